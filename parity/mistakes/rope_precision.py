"""Precision lowered too early on the way to the rotary tables."""

from __future__ import annotations

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ROTARY, TABLES
from parity.mistakes.seams import Function, narrow, wrapped
from reimpl import rope
from reimpl.rope import RotaryEmbedding

KIND = "rope precision"


def count_in_bfloat16(forward: Function) -> Function:
    return lambda self, x, positions: forward(self, x, positions.bfloat16().long())


def tables_in_bfloat16(forward: Function) -> Function:
    return lambda self, x, positions: tuple(table.bfloat16().to(x.dtype) for table in forward(self, x, positions))


MISTAKES = (
    Mistake(
        "counts positions in bfloat16",
        wrapped(RotaryEmbedding, "forward", count_in_bfloat16),
        (Place(ROTARY, TABLES, "b1 s4 @3000", "b1 s12"),),
        ("cos",),
        "positions beyond 256, which bfloat16 cannot count",
        source="EleutherAI/gpt-neox#1003",
    ),
    Mistake(
        "rounds the frequencies to bfloat16",
        wrapped(rope, "_tables", lambda tables: lambda given: tables(given).bfloat16().float()),
        (Place(ROTARY, TABLES, "b1 s4", "b1 s1"),),
        ("cos",),
        "a position after the first",
        source="EleutherAI/gpt-neox#1003",
    ),
    Mistake(
        "keeps the tables in bfloat16",
        wrapped(RotaryEmbedding, "forward", tables_in_bfloat16),
        (Place(ROTARY, TABLES, "b1 s4", "b1 s1"),),
        ("cos",),
        "a position after the first, and a model in more than bfloat16",
    ),
    Mistake(
        "computes angles in the model's dtype",
        narrow(rope),
        (Place(ROTARY, TABLES, "b1 s4 @40", "b1 s4 f32"),),
        ("rotary angle",),
        "half precision",
        verdicts=("output", "cache", "precision"),
        dtype="bf16",
        source="EleutherAI/gpt-neox#1003",
    ),
)
