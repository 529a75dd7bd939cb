"""The frequencies of the rotation: their base, their exponent, the positions they are multiplied with."""

from __future__ import annotations

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ROTARY, TABLES
from parity.mistakes.seams import Function, roped, wrapped
from reimpl import rope

KIND = "rope base"


def halve_exponent(periods: Function) -> Function:
    return lambda base, *rest, **named: periods(base**0.5, *rest, **named)


MISTAKES = (
    Mistake(
        "ignores rope_theta",
        roped(lambda fields: {"rope_theta": 10000.0}),
        (Place(ROTARY, TABLES, "theta=100 b1 s3", "b1 s4"),),
        ("cos",),
        "a base other than 10000, and a position after the first",
        source="deepspeedai/DeepSpeed#8345",
    ),
    Mistake(
        "takes i/d for the exponent 2i/d of the frequencies",
        wrapped(rope, "_periods", halve_exponent),
        (Place(ROTARY, TABLES, "b1 s3", "b1 s1"),),
        ("cos",),
        "a position after the first",
    ),
)
