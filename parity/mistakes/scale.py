"""What scores are multiplied with."""

from __future__ import annotations

from typing import Any

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, BERT, GPT2, GROUPED, HEADS, LATENT
from parity.mistakes.seams import Function, configured, scored, wrapped
from reimpl.gpt2 import GPT2Config

KIND = "scale"
SCORES = ("scores",)
EVERYWHERE = (Place((*HEADS, *BERT, *LATENT), ATTENDING, "b1 s2", "b1 s1"),)
TWO_TOKENS = "more than one key: a single weight is 1 whatever its score"


def hidden_over_heads(layer: Any) -> float:
    """From the scale by head_dim to that by hidden_size / heads."""
    heads = layer.q_proj.out_features // layer.head_dim
    return (layer.q_proj.in_features / heads) ** -0.5 / layer.scale


def of_the_layer_before(scale: Function) -> Function:
    return lambda self, layer_idx: scale(self, max(0, layer_idx - 1))


MISTAKES = (
    Mistake(
        "does not scale the scores",
        scored(lambda layer: 1 / layer.scale),
        EVERYWHERE,
        SCORES,
        TWO_TOKENS,
        remedy="weights |= {name: q * head_dim**-0.5 for name, q in weights.items() if 'q_proj' in name}",
    ),
    Mistake(
        "scales the scores twice",
        scored(lambda layer: layer.scale),
        EVERYWHERE,
        SCORES,
        TWO_TOKENS,
        source="huggingface/transformers#38277",
        remedy="weights |= {name: q * head_dim**0.5 for name, q in weights.items() if 'q_proj' in name}",
    ),
    Mistake(
        "scales by the fourth root of head_dim for the second",
        scored(lambda layer: layer.scale**-0.5),
        EVERYWHERE,
        SCORES,
        TWO_TOKENS,
    ),
    Mistake(
        "scales by hidden_size / heads for head_dim",
        scored(hidden_over_heads),
        (Place(GROUPED, ATTENDING, "b1 s2", "square=yes b1 s4"),),
        SCORES,
        "a head_dim that is not hidden_size / heads",
        source="huggingface/transformers#37187",
    ),
    Mistake(
        "ignores scale_attn_weights",
        configured(lambda fields: {"scale_attn_weights": True}),
        (Place(GPT2, (*ATTENDING, "cross_attention"), "scaled=no b1 s2", "b1 s4"),),
        SCORES,
        "scale_attn_weights off, and more than one key",
        source="huggingface/transformers#44380",
    ),
    Mistake(
        "ignores scale_attn_by_inverse_layer_idx",
        configured(lambda fields: {"scale_attn_by_inverse_layer_idx": False}),
        (Place(GPT2, (*ATTENDING, "cross_attention"), "by_layer=yes b1 s2", "b1 s4"),),
        SCORES,
        "scale_attn_by_inverse_layer_idx on, a layer after the first, and more than one key",
        source="huggingface/transformers#44380",
    ),
    Mistake(
        "divides scores by the layer's index for its number",
        wrapped(GPT2Config, "attention_scale", of_the_layer_before),
        (Place(GPT2, (*ATTENDING, "cross_attention"), "by_layer=yes b1 s2", "b1 s4"),),
        SCORES,
        "scale_attn_by_inverse_layer_idx on, a layer after the first, and more than one key",
    ),
)
