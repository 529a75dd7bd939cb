"""What every second implementation has: the mistakes that it makes on request, and arithmetic without reimpl."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp(min=0),
}


class Part(nn.Module):
    """A layer that makes the mistakes it is told to, each by its name in the catalogue.

    Raises:
        ValueError: for a mistake that it cannot make.
    """

    MAKES: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, wrong: Iterable[str] = ()) -> None:
        super().__init__()
        self.wrong = frozenset(wrong)
        if unknown := self.wrong - self.MAKES:
            raise ValueError(f"{type(self).__name__} cannot make these mistakes: {', '.join(sorted(unknown))}")

    def does(self, mistake: str) -> bool:
        """Whether it is to make a mistake."""
        if mistake not in self.MAKES:
            raise ValueError(f"{type(self).__name__} does not list the mistake {mistake!r}")
        return mistake in self.wrong


def wide(x: Tensor) -> Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def empty(*shape: int) -> nn.Parameter:
    """A parameter that is to be loaded."""
    return nn.Parameter(torch.zeros(shape))


def turn(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """x e^(i angle), pairs of channels as complex numbers, [batch, tokens, rotary]; tables hold each angle twice."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if adjacent else (x[..., :half], x[..., half:])
    turned = torch.complex(wide(a), wide(b)) * torch.complex(wide(cos[..., :half]), wide(sin[..., :half]))
    parts = (turned.real, turned.imag)
    joined = torch.stack(parts, -1).flatten(-2) if adjacent else torch.cat(parts, -1)
    return joined.to(x.dtype)


def look_up(scores: Tensor, v: Tensor, allowed: Tensor | None, late: bool = False) -> Tensor:
    """softmax(scores) v of one head, by exponentials; [batch, queries, keys] and [batch, keys, channels].

    Args:
        late: the mask is applied to the weights after they have been normalised.
    """
    visible = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed.expand_as(scores)
    counted = torch.ones_like(visible) if late else visible
    shifted = scores.masked_fill(~counted, -torch.inf)
    powers = (shifted - shifted.amax(-1, keepdim=True)).exp()
    weights = powers / powers.sum(-1, keepdim=True)
    return (weights * visible).to(v.dtype) @ v


def normed(x: Tensor, gain: Tensor, eps: float, makes: Callable[[str], bool] = lambda mistake: False) -> Tensor:
    """x over its root mean square, as a power of the sum of squares, times the gain."""
    value, size = wide(x), x.shape[-1]
    if makes("subtracts the mean"):
        value = value - value.sum(-1, keepdim=True) / size
    squares = (value * value).sum(-1, keepdim=True) / (size - makes("divides squares by n - 1"))
    power = squares**-0.5 if makes("adds the epsilon outside of the root") else (squares + eps) ** -0.5
    if makes("adds the epsilon outside of the root"):
        power = 1 / (squares**0.5 + eps)
    if makes("detaches the statistic of the norm"):
        power = power.detach()
    gain = wide(gain)
    if makes("forgets the gains"):
        gain = torch.ones_like(gain)
    if makes("adds 1 to the gains"):
        gain = gain + 1
    return (value * power * gain).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    return F.linear(x, weight, bias)


Config = Any
