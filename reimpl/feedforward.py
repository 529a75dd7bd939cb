"""The layers that work on each token by itself."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def gelu_fast(x: Tensor) -> Tensor:
    """`gelu_tanh` with sqrt(2/pi) cut to ten digits."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))


def gelu_clipped(x: Tensor) -> Tensor:
    """GELU clipped to [-10, 10], for quantisation (arXiv:2004.09602)."""
    return F.gelu(x).clamp(-10, 10)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (arXiv:1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(ln(1 + e^x))."""
    return F.softplus(x).sqrt()


def identity(x: Tensor) -> Tensor:
    """x."""
    return x


def laplace(x: Tensor) -> Tensor:
    """(1 + erf((x - mu) / (sigma sqrt 2))) / 2, the stand-in for squared ReLU (Ma et al. 2022, arXiv:2209.10655)."""
    mu, sigma = 0.707107, 0.282095
    return 0.5 * (1 + torch.erf((x - mu) / (sigma * math.sqrt(2))))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_10": gelu_clipped,
    "gelu_accurate": gelu_tanh,
    "gelu_fast": gelu_fast,
    "gelu_new": gelu_tanh,
    "gelu_python": F.gelu,
    "gelu_python_tanh": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "hardswish": F.hardswish,
    "laplace": laplace,
    "leaky_relu": F.leaky_relu,
    "linear": identity,
    "mish": F.mish,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": sqrt_softplus,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""By the names that config.json uses (`hidden_act`, `activation_function`); those with parameters are left out."""


def activation(name: str) -> Activation:
    """Raises ValueError for an unknown name, with the known ones."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: known are {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


class FeedForward(nn.Module):
    """down(act(up(x))) (Vaswani et al. 2017, arXiv:1706.03762, section 3.3)."""

    def __init__(self, size: int, hidden: int, act: str, bias: bool = True) -> None:
        super().__init__()
        self.up_proj = nn.Linear(size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, size, bias=bias)
        self.act = activation(act)

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.down_proj(self.act(self.up_proj(x)))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) * up(x)); with SiLU it is SwiGLU (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

    def __init__(self, size: int, hidden: int, act: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, hidden, bias=bias)
        self.up_proj = nn.Linear(size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, size, bias=bias)
        self.act = activation(act)

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
