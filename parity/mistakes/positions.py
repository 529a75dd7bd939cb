"""Which position a token has."""

from __future__ import annotations

import torch

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import (
    ATTENDING,
    BERT,
    BERT_DECODER,
    DECODERS,
    GROUPED,
    LANGUAGE_MODELS,
    LATENT,
    LEARNED,
    MODELS,
    POSITIONED,
)
from parity.mistakes.seams import Fields, Function, called, rotating, wrapped
from reimpl.decoder import CausalLM
from reimpl.position import LearnedPosition
from reimpl.rope import RotaryEmbedding

KIND = "positions"
ROTATED = ("q after rotation", "k after rotation")
PARTS = ("cos", *ROTATED, "wpe", "drop", "position_embeddings", "input of LayerNorm")  # GPT-2 drops out their sum


def causal_models(shows: str, unseen: str = "") -> tuple[Place, ...]:
    """Whole models that know positions, and in which a token sees none after it."""
    return Place(POSITIONED, MODELS, shows, unseen), Place(BERT, BERT_DECODER, shows, unseen)


def same_for_all_rows(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing="half": rotate(x, cos[:1], sin[:1], pairing)


def count_from_one(forward: Function) -> Function:
    return lambda self, x, positions: forward(self, x, positions + 1)


def read_one_further(forward: Function) -> Function:
    return lambda self, positions: forward(self, (positions + 1) % self.num_embeddings)


def always_from_zero(forward: Function) -> Function:
    return lambda self, positions: forward(self, torch.arange(positions.shape[1])[None].expand_as(positions))


def lengths(given: Fields) -> tuple[int, int]:
    """How many tokens were seen before, and how many are new."""
    held, tokens = given.get("cache"), given.get("ids")
    tokens = given["embeddings"] if tokens is None else tokens
    return 0 if held is None else held.length, tokens.shape[1]


def decode_from_zero(given: Fields) -> Fields:
    seen, new = lengths(given)
    return {"positions": torch.arange(new)[None]} if seen and given.get("positions") is None else {}


def decode_one_further(given: Fields) -> Fields:
    seen, new = lengths(given)
    return (
        {"positions": torch.arange(seen + 1, seen + 1 + new)[None]} if seen and given.get("positions") is None else {}
    )


def stay_in_decoding(given: Fields) -> Fields:
    """Every chunk after the first begins where the second does."""
    held = given.get("cache")
    seen, new = lengths(given)
    if held is None or given.get("positions") is not None:
        return {}
    begin = min(seen, getattr(held, "first_chunk", seen))
    if seen:
        held.first_chunk = begin
    return {"positions": torch.arange(begin, begin + new)[None]}


def count_valid_tokens(given: Fields) -> Fields:
    """Padding is left out of the count, though the caller gave no positions."""
    valid = given.get("valid")
    _, new = lengths(given)
    if valid is None or given.get("positions") is not None:
        return {}
    return {"positions": (valid.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]}


def first_row(given: Fields) -> Fields:
    positions = given.get("positions")
    return {} if positions is None else {"positions": positions[:1].expand_as(positions)}


MISTAKES = (
    Mistake(
        "uses the positions of the first row for all rows",
        rotating(same_for_all_rows),
        (Place((*GROUPED, *LATENT), ATTENDING, "b2 s4 left0,2 masked", "b3 s4"),),
        ROTATED,
        "rows whose positions differ",
        source="linkedin/Liger-Kernel#477",
    ),
    Mistake(
        "looks up the positions of the first row for all rows",
        called(first_row),
        causal_models("b2 s5 inner0,2 masked", "b3 s4"),
        PARTS,
        "rows whose positions differ",
        source="linkedin/Liger-Kernel#477",
    ),
    Mistake(
        "decodes from position 0 again",
        called(decode_from_zero),
        causal_models("b1 s4,1", "b1 s4"),
        PARTS,
        "a chunk after others in the cache",
        source="unslothai/unsloth#3699",
    ),
    Mistake(
        "decodes one position further on",
        called(decode_one_further),
        causal_models("b1 s4,1", "b1 s4"),
        PARTS,
        "a chunk after others in the cache",
        source="unslothai/unsloth#3699",
    ),
    Mistake(
        "stays at one position while it decodes",
        called(stay_in_decoding),
        causal_models("b1 s4,1,1", "b1 s4,1"),
        PARTS,
        "more than one chunk after the first",
    ),
    Mistake(
        "ignores the positions given",
        called(lambda given: {"positions": None}),
        causal_models("b2 s5 inner0,2 masked", "b1 s4"),
        PARTS,
        "positions that are not those counted from the cache",
    ),
    Mistake(
        "leaves padding out of positions that the reference counts with it",
        called(count_valid_tokens),
        causal_models("b2 s5 inner0,2", "b1 s4"),
        PARTS,
        "padding, and no positions given",
    ),
    Mistake(
        "counts positions from 1",
        wrapped(RotaryEmbedding, "forward", count_from_one),
        (Place(DECODERS, MODELS, "b1 s2"),),
        PARTS,
        "any cache that is looked into: keys and queries stand further on alike, so no output shows it",
        verdicts=("cache",),
    ),
    Mistake(
        "reads the table of positions one row further on",
        wrapped(LearnedPosition, "forward", read_one_further),
        (Place(LEARNED, MODELS, "b1 s2"), Place(BERT, ("embeddings", "model", "decoder_model", "logits"), "b1 s2")),
        (*PARTS, "output", "LayerNorm"),
        "any token",
    ),
    Mistake(
        "reads the table of positions from its first row on",
        wrapped(LearnedPosition, "forward", always_from_zero),
        (
            Place(LEARNED, MODELS, "b1 s2 @1", "b1 s4"),
            Place(BERT, ("embeddings", "model", "decoder_model", "logits"), "b1 s2 @1", "b1 s4"),
        ),
        (*PARTS, "output", "LayerNorm"),
        "positions that do not begin at 0",
    ),
    Mistake(
        "generates as though no prompt were padded",
        wrapped(CausalLM, "generate", lambda generate: lambda *args, valid, **named: generate(*args, **named)),
        (Place(LANGUAGE_MODELS, ("logits",), "b2 s6 left0,4", "b2 s4"),),
        (),
        "padded prompts",
        prop="generation",
    ),
)
