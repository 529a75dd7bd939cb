"""Norms of queries and keys: before or after the rotation, over one head or all, with whose gains."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, BLOCKS, NORMED_HEADS
from parity.mistakes.seams import Function, built, exchanged, several, swapped, wrapped
from reimpl.attention import Attention
from reimpl.qwen3 import Qwen3Attention

KIND = "qk norm"
ROTATED = ("q after rotation", "k after rotation")


def norm_after_turning(turn: Function) -> Function:
    def call(self: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
        q, k = turn(self, *args)
        return (self.q_norm(q), self.k_norm(k)) if hasattr(self, "q_norm") else (q, k)

    return call


def skip(*names: str) -> Function:
    def change(layer: Any) -> None:
        for name in names:
            setattr(getattr(layer, name), "forward", lambda x: x)  # noqa: B010 (a type checker knows it as a method)

    return change


def over_all_heads(layer: Any) -> None:
    """The statistic is that of all heads of a token, [batch, heads, seq, dim]."""
    for norm in (layer.q_norm, layer.k_norm):

        def forward(x: Tensor, norm: Any = norm) -> Tensor:
            return x / (x.square().mean((1, 3), keepdim=True) + norm.eps).sqrt() * norm.weight

        norm.forward = forward


def forget_eps(layer: Any) -> None:
    layer.q_norm.eps = layer.k_norm.eps = 1e-6


def norm_v_too(project: Function) -> Function:
    def call(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(self, x)
        return q, k, self.k_norm(v)

    return call


MISTAKES = (
    Mistake(
        "norms queries and keys after the rotation",
        several(
            exchanged(Qwen3Attention, "project", Attention.project), wrapped(Attention, "turn", norm_after_turning)
        ),
        (Place(NORMED_HEADS, ATTENDING, "b1 s2", "b1 s1"),),
        ("q_norm", "k_norm", *ROTATED),
        "more than one position, and gains that differ",
        source="pytorch/torchtune#2809",
    ),
    Mistake(
        "swaps the gains of queries and keys",
        swapped("q_norm", "k_norm"),
        (Place(NORMED_HEADS, ATTENDING, "b1 s2"),),
        ("q_norm", "k_norm"),
        "any cache; in outputs, more than one token, as the product of the two gains is what counts at one position",
        remedy="one, other = 'q_norm.weight', 'k_norm.weight'; "
        "weights[one], weights[other] = weights[other], weights[one]",
    ),
    Mistake(
        "does not norm keys",
        built(Qwen3Attention, skip("k_norm")),
        (Place(NORMED_HEADS, ATTENDING, "b1 s2"),),
        ("k_norm",),
        "any cache; in outputs, more than one token",
    ),
    Mistake(
        "does not norm queries",
        built(Qwen3Attention, skip("q_norm")),
        (Place(NORMED_HEADS, ATTENDING, "b1 s2", "b1 s1"),),
        ("q_norm",),
        "more than one token",
    ),
    Mistake(
        "norms neither queries nor keys",
        built(Qwen3Attention, skip("q_norm", "k_norm")),
        (Place(NORMED_HEADS, ATTENDING, "b1 s2"),),
        ("q_norm", "k_norm"),
        "any cache; in outputs, more than one token",
    ),
    Mistake(
        "norms queries and keys over all heads together",
        built(Qwen3Attention, over_all_heads),
        (Place(NORMED_HEADS, ATTENDING, "h6/3 b1 s2", "h1/1 b1 s4"),),
        ("q_norm", "k_norm"),
        "more than one head",
    ),
    Mistake(
        "norms values too",
        wrapped(Qwen3Attention, "project", norm_v_too),
        (Place(NORMED_HEADS, ATTENDING, "b1 s2"),),
        ("cached v", "v"),
        "any input: no value has a root mean square of 1",
    ),
    Mistake(
        "gives the norms of queries and keys an epsilon of their own",
        built(Qwen3Attention, forget_eps),
        (Place(NORMED_HEADS, BLOCKS, "eps=0.01 b1 s2", "b1 s4"),),
        ("q_norm", "k_norm"),
        "an rms_norm_eps other than the default",
    ),
)
