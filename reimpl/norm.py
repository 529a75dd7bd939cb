"""Normalisation over the last axis, with statistics in at least float32."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.precision import wide


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with rms(x) = sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    The choice in which implementations differ: the normalised value is rounded to the dtype of `x` *before* it is
    multiplied by the gain, as T5 and Llama do.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        value = x.to(wide(x))
        normalised = value * inverse_rms(value, self.eps)
        return normalised.to(x.dtype) * self.weight

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


def inverse_rms(x: Float[Tensor, "*batch size"], eps: float) -> Float[Tensor, "*batch 1"]:
    """1 / sqrt(mean(x^2) + eps)."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class GroupNorm(nn.Module):
    """`LayerNorm` over all channels and positions of an image at once (Wu and He 2018, arXiv:1803.08494, eq. 1 and 6).

    Of one group. Gain and bias are those of a channel.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "batch channels *place"]) -> Float[Tensor, "batch channels *place"]:
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016, arXiv:1607.06450, eq. 4), biased variance.

    Unlike in `RMSNorm`, gain and bias are applied before the result is rounded to the dtype of `x`.
    """

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        # The kernel accumulates half precision in float32 itself.
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"
