"""Which query heads read which key/value heads, and how the heads are joined."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, GROUPED
from parity.mistakes.seams import Function, wrapped
from reimpl.attention import MultiHead

KIND = "grouped heads"


def tile(mix: Function) -> Function:
    """Query head h reads key/value head h modulo their number."""

    def call(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return mix(self, q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), mask)

    return call


def merge_channels_first(mix: Function) -> Function:
    def call(self: Any, *args: Any) -> Tensor:
        return mix(self, *args).unflatten(-1, (-1, self.head_dim)).transpose(-1, -2).flatten(-2)

    return call


MISTAKES = (
    Mistake(
        "tiles key/value heads where the reference repeats each",
        wrapped(MultiHead, "mix", tile),
        (Place(GROUPED, ATTENDING, "h6/3 b1 s2", "h4/1 b1 s4"),),
        ("scores",),
        "several key/value heads, but fewer than heads",
        source="onnx/onnx#7274",
    ),
    Mistake(
        "mixes heads and channels when heads are joined",
        wrapped(MultiHead, "mix", merge_channels_first),
        (Place(GROUPED, ATTENDING, "b1 s2", "h1/1 b1 s4"),),
        ("context", "o_proj"),
        "more than one head",
    ),
)
