"""Sinusoidal positions in both layouts, of odd sizes too, from any offset on, and what they are added to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parity import reference
from parity.compare import Judgement, Quantity, Record
from parity.compare import judge as hold_against
from parity.function import Function, same
from parity.tiny import draw
from reimpl.marian import MarianConfig, MarianEmbeddings
from reimpl.position import sinusoidal

ROWS = 2


@dataclass(frozen=True)
class Tokens:
    """So many tokens after others that a cache holds, of so many channels, perhaps times sqrt(size)."""

    length: int
    offset: int
    size: int
    scaled: bool
    seed: int


def judge(tokens: Tokens) -> list[Judgement]:
    """Both layouts entry by entry, Marian's table to the bit, and the sum with embeddings after what is cached."""
    positions = torch.arange(tokens.offset, tokens.offset + tokens.length)
    interleaved = sinusoidal(positions, tokens.size, dtype=torch.float64)
    halved = sinusoidal(positions, tokens.size, layout="halved", dtype=torch.float64)
    theirs = marian(tokens)
    words = draw.bfloat16(draw.normal((ROWS, tokens.length, tokens.size), tokens.seed, "words")).double()
    with torch.no_grad():
        ours = embeddings(tokens).embed(None, words, tokens.offset)
    scale = math.sqrt(tokens.size) if tokens.scaled else 1.0
    values = {
        "interleaved": (interleaved, formula(tokens, [*range(tokens.size)])),
        "halved": (halved, formula(tokens, [*range(0, tokens.size, 2), *range(1, tokens.size, 2)])),
        "embeddings": (ours, words * scale + theirs.double()),
    }
    rounded = sinusoidal(positions, tokens.size, layout="halved")
    return [*_held(values), same("Marian's table", rounded.tolist(), theirs.tolist())]


def formula(tokens: Tokens, channels: list[int]) -> Tensor:
    """Channel 2i of a position is sin(position / 10000^(2i / size)), channel 2i + 1 the cosine of the same."""

    def entry(position: int, channel: int) -> float:
        angle = position / 10000 ** ((channel - channel % 2) / tokens.size)
        return math.cos(angle) if channel % 2 else math.sin(angle)

    rows = range(tokens.offset, tokens.offset + tokens.length)
    return torch.tensor([[entry(row, channel) for channel in channels] for row in rows], dtype=torch.float64)


def marian(tokens: Tokens) -> Tensor:
    """What the reference looks up after so many cached tokens, [length, size]."""
    cls: Any = reference.layer_class("marian", "MarianSinusoidalPositionalEmbedding")
    table = cls(tokens.offset + tokens.length, tokens.size)
    table.weight.data = table.create_weight()
    with torch.no_grad():
        return table(torch.Size((ROWS, tokens.length)), tokens.offset)


def embeddings(tokens: Tokens) -> MarianEmbeddings:
    """Ours, of which only the positions and the scale matter here."""
    fields = {
        "model_type": "marian",
        "vocab_size": 2,
        "pad_token_id": 0,
        "d_model": tokens.size,
        "scale_embedding": tokens.scaled,
        "dropout": 0.0,
        "max_position_embeddings": tokens.offset + tokens.length,
        **{f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")},
    }
    return MarianEmbeddings(MarianConfig.from_dict(fields))


def _held(values: dict[str, tuple[Tensor, Tensor]]) -> list[Judgement]:
    quantities = [Quantity(name, "output") for name in values]
    ours, truth = (
        Record(quantities, [pair[side] for pair in values.values()], [None] * len(values)) for side in (0, 1)
    )
    return hold_against(truth, ours, [], torch.float64, "f64")


FUNCTION = Function(
    "positions",
    "sinusoidal positions, interleaved and halved, of odd sizes too, after cached tokens, added to scaled embeddings",
    "reimpl.position.sinusoidal, reimpl.marian.MarianEmbeddings",
    "the paper's formula; MarianSinusoidalPositionalEmbedding",
    st.builds(
        Tokens,
        length=st.integers(1, 9),
        offset=st.integers(0, 40) | st.integers(0, 2000),
        size=st.integers(2, 65),
        scaled=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    ),
    judge,
)
