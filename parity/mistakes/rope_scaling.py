"""What stretches the frequencies for a longer context: dropped, turned over, or with the wrong length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ROTARY, TABLES
from parity.mistakes.seams import Fields, Function, configured, exchanged, roped, wrapped
from reimpl import rope

KIND = "rope scaling"
PLAIN = "b1 s4"


def scale_nothing(fields: Fields) -> Fields:
    given = fields.get("rope_parameters")
    if given is None:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": given["rope_theta"]}}


def multiply_linear(fields: Fields) -> Fields:
    given = fields["rope_parameters"]
    return {"factor": 1 / given["factor"]} if given["rope_type"] == "linear" else {}


def take_longer_length(fields: Fields) -> Fields:
    """The length after the context was extended, where the one before is meant."""
    return {"original_max_position_embeddings": fields["max_position_embeddings"]}


def stay_long(grow: Function) -> Function:
    """Once frequencies have been recomputed for a long prompt, short ones get them, too."""

    def call(self: Any, positions: Tensor) -> Tensor:
        furthest = torch.tensor([[self.longest - 1]])
        return grow(self, positions if self.current is self.initial else torch.cat([positions[:1], furthest], dim=1))

    return call


MISTAKES = (
    Mistake(
        "ignores the scaling of the frequencies",
        configured(scale_nothing),
        (Place(ROTARY, TABLES, "rope=llama3 b1 s12", PLAIN),),
        ("cos",),
        "a rope type other than the default",
    ),
    Mistake(
        "multiplies by the linear factor",
        roped(multiply_linear),
        (Place(ROTARY, TABLES, "rope=linear b1 s4", PLAIN),),
        ("cos",),
        "a linear factor other than 1",
    ),
    Mistake(
        "scales frequencies by the extended length for the original one",
        roped(take_longer_length),
        (Place(ROTARY, TABLES, "rope=llama3 b1 s4", "rope=linear b1 s4"),),
        ("cos",),
        "a rope type with an original length, which is not max_position_embeddings",
        source="TransformerLensOrg/TransformerLens#910",
    ),
    Mistake(
        "keeps the frequencies of a long prompt for a short one",
        wrapped(rope.Growing, "__call__", stay_long),
        (Place(ROTARY, ("rotary",), "rope=dynamic b1 s4,4,4 @100", "rope=dynamic b1 s2,2,2"),),
        ("cos",),
        "a short prompt after a long one on the same module",
        prop="tables",
        source="huggingface/transformers#25306",
    ),
    Mistake(
        "drops the attention factor of yarn",
        exchanged(rope, "_yarn_attention_factor", lambda given: 1.0),
        (Place(ROTARY, TABLES, "rope=yarn b1 s1", "rope=longrope b1 s4"),),
        ("cos",),
        "yarn with a factor above 1",
    ),
    Mistake(
        "takes the short factors of longrope at any length",
        exchanged(rope.Switching, "__call__", rope.Fixed.__call__),
        (Place(ROTARY, TABLES, "rope=longrope b1 s4 @40", "rope=longrope b1 s4"),),
        ("cos",),
        "longrope beyond the original length",
    ),
)
