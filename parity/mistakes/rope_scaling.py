"""What stretches the frequencies for a longer context: dropped, turned over, or with the wrong length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import LATENT, ROTARY, TABLES
from parity.mistakes.seams import Fields, Function, built, configured, exchanged, exchanged_in, roped, wrapped
from reimpl import rope
from reimpl.rope import Rope, RotaryEmbedding, yarn_magnitude

KIND = "rope scaling"
PLAIN = "b1 s4"
COS = ("cos",)


def scale_nothing(fields: Fields) -> Fields:
    given = fields.get("rope_parameters")
    if given is None:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": given["rope_theta"]}}


def only(rope_type: str, change: Function) -> Function:
    """A change of the fields of one rope type."""

    def call(fields: Fields) -> Fields:
        given = fields["rope_parameters"]
        return change(given) if given["rope_type"] == rope_type else {}

    return call


def swap_factors(given: Fields) -> Fields:
    return {"low_freq_factor": given["high_freq_factor"], "high_freq_factor": given["low_freq_factor"]}


def take_longer_length(fields: Fields) -> Fields:
    """The length after the context was extended, where the one before is meant."""
    return {"original_max_position_embeddings": fields["max_position_embeddings"]}


def stay_long(grow: Function) -> Function:
    """Once frequencies have been recomputed for a long prompt, short ones get them, too."""

    def call(self: Any, positions: Tensor) -> Tensor:
        furthest = torch.tensor([[self.longest - 1]])
        return grow(self, positions if self.current is self.initial else torch.cat([positions[:1], furthest], dim=1))

    return call


def grown_for_the_maximum(given: Rope) -> tuple[Tensor, float]:
    """Of `dynamic`: the base that the longest context would need, at any length."""
    return rope._dynamic(replace(given, length=int(given.max_position_embeddings * given.need("factor"))))


def grown_by_the_factor(given: Rope) -> tuple[Tensor, float]:
    """Of `dynamic`: the base times the factor alone, without the length."""
    width = given.width
    return 1 / rope._periods(given.base * given.need("factor") ** (width / (width - 2)), width), 1.0


def interpolate_fast_pairs(given: Rope) -> tuple[Tensor, float]:
    """Of `yarn`: fast pairs are interpolated and slow ones stay."""
    frequencies, factor = rope._yarn(given)
    periods = rope._periods(given.base, given.width)
    return 1 / periods / given.extension + 1 / periods - frequencies, factor


def without_blend(given: Rope) -> tuple[Tensor, float]:
    """Of `llama3`: what lies between long and short waves stays as it is."""
    plain = 1 / rope._periods(given.base, given.width)
    is_long = 2 * torch.pi / plain > given.original / given.need("low_freq_factor")
    return torch.where(is_long, plain / given.need("factor"), plain), 1.0


MISTAKES = (
    Mistake(
        "ignores the scaling of the frequencies",
        configured(scale_nothing),
        (Place(ROTARY, TABLES, "rope=llama3 b1 s12", PLAIN),),
        COS,
        "a rope type other than the default",
    ),
    Mistake(
        "multiplies by the linear factor",
        roped(only("linear", lambda given: {"factor": 1 / given["factor"]})),
        (Place(ROTARY, TABLES, "rope=linear b1 s4", PLAIN),),
        COS,
        "a linear factor other than 1",
    ),
    Mistake(
        "applies the linear factor twice",
        roped(only("linear", lambda given: {"factor": given["factor"] ** 2})),
        (Place(ROTARY, TABLES, "rope=linear b1 s4", PLAIN),),
        COS,
        "a linear factor other than 1",
    ),
    Mistake(
        "scales frequencies by the extended length for the original one",
        roped(take_longer_length),
        (Place(ROTARY, TABLES, "rope=llama3 b1 s4", "rope=linear b1 s4"),),
        COS,
        "a rope type with an original length, which is not max_position_embeddings",
        source="TransformerLensOrg/TransformerLens#910",
    ),
    Mistake(
        "swaps the factors of low and high frequencies",
        roped(only("llama3", swap_factors)),
        (Place(ROTARY, TABLES, "rope=llama3 b1 s12", PLAIN),),
        COS,
        "llama3, and a wave between long and short",
    ),
    Mistake(
        "leaves out the blend between long and short waves",
        exchanged_in(rope.ROPE_TYPES, llama3=without_blend),
        (Place(ROTARY, TABLES, "rope=llama3 b1 s12", PLAIN),),
        COS,
        "llama3, and a wave between long and short",
    ),
    Mistake(
        "keeps the frequencies of a long prompt for a short one",
        wrapped(rope.Growing, "__call__", stay_long),
        (Place(ROTARY, ("rotary",), "rope=dynamic b1 s4,4,4 @100", "rope=dynamic b1 s2,2,2"),),
        COS,
        "a short prompt after a long one on the same module",
        prop="tables",
        source="huggingface/transformers#25306",
    ),
    Mistake(
        "takes the base of the longest context at any length",
        exchanged_in(rope.ROPE_TYPES, dynamic=grown_for_the_maximum),
        (Place(ROTARY, TABLES, "rope=dynamic b1 s4", PLAIN),),
        COS,
        "dynamic scaling",
        source="vllm-project/vllm#3488",
    ),
    Mistake(
        "lets the base grow with the factor, whatever the length",
        exchanged_in(rope.ROPE_TYPES, dynamic=grown_by_the_factor),
        (Place(ROTARY, TABLES, "rope=dynamic b1 s4", PLAIN),),
        COS,
        "dynamic scaling",
    ),
    Mistake(
        "never lets the base grow",
        exchanged(rope.Growing, "__call__", rope.Fixed.__call__),
        (Place(ROTARY, TABLES, "rope=dynamic b1 s4 @100", "rope=dynamic b1 s4"),),
        COS,
        "dynamic scaling, beyond max_position_embeddings",
    ),
    Mistake(
        "drops the attention factor of yarn",
        exchanged(rope, "_yarn_attention_factor", lambda given: 1.0),
        (Place(ROTARY, TABLES, "rope=yarn b1 s1", "rope=longrope b1 s4"),),
        COS,
        "yarn with a factor above 1",
    ),
    Mistake(
        "applies the attention factor twice",
        built(RotaryEmbedding, lambda tables: setattr(tables, "attention_factor", tables.attention_factor**2)),
        (Place(ROTARY, TABLES, "rope=yarn b1 s1", "rope=linear b1 s4"),),
        COS,
        "yarn or longrope with a factor above 1",
    ),
    Mistake(
        "interpolates fast pairs and keeps slow ones",
        exchanged_in(rope.ROPE_TYPES, yarn=interpolate_fast_pairs),
        (Place(ROTARY, TABLES, "rope=yarn b1 s4", PLAIN),),
        COS,
        "yarn with a factor above 1",
    ),
    Mistake(
        "swaps beta_fast and beta_slow",
        roped(only("yarn", lambda given: {"beta_fast": 1.0, "beta_slow": 32.0})),
        (Place(ROTARY, TABLES, "rope=yarn theta=100 b1 s4", PLAIN),),
        COS,
        "yarn, and so small a base or so many channels that some pair lies between fast and slow",
    ),
    Mistake(
        "enlarges the tables without regard to mscale",
        exchanged(rope, "_yarn_attention_factor", lambda given: yarn_magnitude(given.extension)),
        (Place(LATENT, TABLES, "rope=yarn-1-1 b1 s1", "rope=yarn b1 s4"),),
        COS,
        "yarn with mscale and mscale_all_dim",
        source="NVIDIA/Megatron-LM#1429",
    ),
    Mistake(
        "takes the short factors of longrope at any length",
        exchanged(rope.Switching, "__call__", rope.Fixed.__call__),
        (Place(ROTARY, TABLES, "rope=longrope b1 s4 @40", "rope=longrope b1 s4"),),
        COS,
        "longrope beyond the original length",
    ),
    Mistake(
        "takes the long factors of longrope at any length",
        exchanged(rope.Switching, "__call__", lambda self, positions: self.long),
        (Place(ROTARY, TABLES, "rope=longrope b1 s4", "rope=longrope b1 s4 @40"),),
        COS,
        "longrope up to the original length",
    ),
    Mistake(
        "drops the attention factor of longrope",
        exchanged(rope, "_longrope_attention_factor", lambda given: 1.0),
        (Place(ROTARY, TABLES, "rope=longrope b1 s1", "rope=yarn b1 s4"),),
        COS,
        "longrope with a factor above 1",
    ),
)
