"""What scores are multiplied with."""

from __future__ import annotations

from typing import Any

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, GROUPED, HEADS
from parity.mistakes.seams import scored

KIND = "scale"
ONE_TOKEN = "b1 s1"
TWO_TOKENS = "more than one key: a single weight is 1 whatever its score"


def hidden_over_heads(layer: Any) -> float:
    """From the scale by head_dim to that by hidden_size / heads."""
    heads = layer.q_proj.out_features // layer.head_dim
    return (layer.q_proj.in_features / heads) ** -0.5 / layer.scale


MISTAKES = (
    Mistake(
        "does not scale the scores",
        scored(lambda layer: 1 / layer.scale),
        (Place((*HEADS, "bert"), ATTENDING, "b1 s2", ONE_TOKEN),),
        ("scores",),
        TWO_TOKENS,
        remedy="weights |= {name: q * head_dim**-0.5 for name, q in weights.items() if '.q_proj.' in name}",
    ),
    Mistake(
        "scales the scores twice",
        scored(lambda layer: layer.scale),
        (Place((*HEADS, "bert"), ATTENDING, "b1 s2", ONE_TOKEN),),
        ("scores",),
        TWO_TOKENS,
        source="huggingface/transformers#38277",
        remedy="weights |= {name: q * head_dim**0.5 for name, q in weights.items() if '.q_proj.' in name}",
    ),
    Mistake(
        "scales by hidden_size / heads for head_dim",
        scored(hidden_over_heads),
        (Place(GROUPED, ATTENDING, "b1 s2", "square=yes b1 s4"),),
        ("scores",),
        "a head_dim that is not hidden_size / heads",
        source="huggingface/transformers#37187",
    ),
)
