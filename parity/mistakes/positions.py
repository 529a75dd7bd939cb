"""Which position a token has."""

from __future__ import annotations

import torch

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, DECODERS, GROUPED, LANGUAGE_MODELS, MODELS
from parity.mistakes.seams import Fields, Function, called, rotating, wrapped
from reimpl.decoder import CausalLM
from reimpl.rope import RotaryEmbedding

KIND = "positions"
ROTATED = ("q after rotation", "k after rotation")


def same_for_all_rows(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing="half": rotate(x, cos[:1], sin[:1], pairing)


def count_from_one(forward: Function) -> Function:
    return lambda self, x, positions: forward(self, x, positions + 1)


def decode_from_zero(given: Fields) -> Fields:
    held = given.get("cache")
    if held is None or not held.length or given.get("positions") is not None:
        return {}
    return {"positions": torch.arange(given["ids"].shape[1])[None]}


MISTAKES = (
    Mistake(
        "uses the positions of the first row for all rows",
        rotating(same_for_all_rows),
        (Place(GROUPED, ATTENDING, "b2 s4 left0,2 masked", "b3 s4"),),
        ROTATED,
        "rows whose positions differ",
        source="linkedin/Liger-Kernel#477",
    ),
    Mistake(
        "decodes from position 0 again",
        called(decode_from_zero),
        (Place(DECODERS, MODELS, "b1 s4,1", "b1 s4"),),
        ("cos",),
        "a chunk after others in the cache",
        source="unslothai/unsloth#3699",
    ),
    Mistake(
        "ignores the positions given",
        called(lambda given: {"positions": None}),
        (Place(DECODERS, MODELS, "b2 s5 inner0,2 masked", "b1 s4"),),
        ("cos", *ROTATED),
        "positions that are not those counted from the cache",
    ),
    Mistake(
        "counts positions from 1",
        wrapped(RotaryEmbedding, "forward", count_from_one),
        (Place(DECODERS, MODELS, "b1 s2"),),
        ("cos", *ROTATED),
        "any cache that is looked into: keys and queries stand further on alike, so no output shows it",
        verdicts=("cache",),
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
