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


ROTATIONS = frozenset(
    {
        "rotates adjacent pairs where the reference rotates halves",
        "rotates the wrong way",
        "rotates k the wrong way, and q the right way",
        "leaves k unrotated",
        "leaves q unrotated",
        "takes sines for cosines",
        "adds the turned half where it should be subtracted",
        "rotates half of each head where the reference rotates all of it",
        "uses the positions of the first row for all rows",
    }
)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, name: str, does: Callable[[str], bool]) -> Tensor:
    """Queries (`q`), keys (`k`) or values in half layout, rotated with the mistakes that are made."""
    if does("uses the positions of the first row for all rows"):
        cos, sin = cos[:1], sin[:1]
    if name in "qk" and does(f"leaves {name} unrotated"):
        return x
    if does("takes sines for cosines"):
        cos, sin = sin, cos
    if does("rotates the wrong way") or (name == "k" and does("rotates k the wrong way, and q the right way")):
        sin = -sin
    if does("adds the turned half where it should be subtracted"):
        a, b = x.chunk(2, -1)
        return torch.cat(
            (a * cos[..., : a.shape[-1]] + b * sin[..., : a.shape[-1]], turn(x, cos, sin).chunk(2, -1)[1]), -1
        )
    width = cos.shape[-1]
    if does("rotates half of each head where the reference rotates all of it"):
        width = 2 * max(1, width // 4)
        cos, sin = (torch.cat((table[..., : width // 2],) * 2, -1) for table in (cos, sin))
    adjacent = does("rotates adjacent pairs where the reference rotates halves")
    return torch.cat((turn(x[..., :width], cos, sin, adjacent), x[..., width:]), -1)


JOINTS = frozenset({"mixes heads and channels when heads are joined", "mixes heads and tokens when heads are joined"})


def joined(contexts: list[Tensor], does: Callable[[str], bool]) -> Tensor:
    """The contexts of all heads side by side, [batch, tokens, channels]."""
    if does("mixes heads and channels when heads are joined"):
        return torch.stack([context[..., i] for i in range(contexts[0].shape[-1]) for context in contexts], -1)
    if does("mixes heads and tokens when heads are joined"):
        return torch.cat(contexts, 1).reshape(len(contexts[0]), contexts[0].shape[1], -1)
    return torch.cat(contexts, -1)


SCALES = frozenset(
    {
        "does not scale the scores",
        "scales the scores twice",
        "scales by the fourth root of head_dim for the second",
    }
)


def scaled(scale: float, does: Callable[[str], bool]) -> float:
    """What scores are multiplied with."""
    if does("does not scale the scores"):
        return 1.0
    if does("scales by the fourth root of head_dim for the second"):
        return scale**0.5
    return scale * scale if does("scales the scores twice") else scale


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
    count = 1 if makes("sums squares for their mean") else size - makes("divides squares by n - 1")
    squares = (value * value).sum(-1, keepdim=True) / count
    power = (squares + eps) ** -0.5
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
