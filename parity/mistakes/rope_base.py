"""The frequencies of the rotation: their base and their exponent."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ROTARY, TABLES
from parity.mistakes.seams import Function, roped, wrapped
from reimpl import rope

KIND = "rope base"
PLACES = (Place(ROTARY, TABLES, "b1 s3", "b1 s1"),)
COS = ("cos",)


def halve_exponent(periods: Function) -> Function:
    return lambda base, *rest, **named: periods(base**0.5, *rest, **named)


def double_exponent(periods: Function) -> Function:
    return lambda base, *rest, **named: periods(base**2, *rest, **named)


def count_pairs_from_one(periods: Function) -> Function:
    def call(base: float | Tensor, width: int, channels: int | None = None) -> Tensor:
        return periods(base, width, channels) * base ** (2 / width)

    return call


def one_pair_fewer(periods: Function) -> Function:
    """Exponents run from 0 to 1, as `linspace` has it, and reach the base itself."""

    def call(base: float | Tensor, width: int, channels: int | None = None) -> Tensor:
        return base ** torch.linspace(0, 1, len(periods(base, width, channels)))

    return call


MISTAKES = (
    Mistake(
        "ignores rope_theta",
        roped(lambda fields: {"rope_theta": 10000.0}),
        (Place(ROTARY, TABLES, "theta=100 b1 s3", "b1 s4"),),
        COS,
        "a base other than 10000, and a position after the first",
        source="deepspeedai/DeepSpeed#8345",
    ),
    Mistake(
        "takes i/d for the exponent 2i/d of the frequencies",
        wrapped(rope, "_periods", halve_exponent),
        PLACES,
        COS,
        "a position after the first",
    ),
    Mistake(
        "takes 4i/d for the exponent 2i/d of the frequencies",
        wrapped(rope, "_periods", double_exponent),
        PLACES,
        COS,
        "a position after the first",
    ),
    Mistake(
        "counts the pairs of channels from 1",
        wrapped(rope, "_periods", count_pairs_from_one),
        PLACES,
        COS,
        "a position after the first",
    ),
    Mistake(
        "spreads the frequencies from 1 to 1/base, both included",
        wrapped(rope, "_periods", one_pair_fewer),
        PLACES,
        COS,
        "a position after the first",
    ),
)
