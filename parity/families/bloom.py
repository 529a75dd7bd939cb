"""BLOOM: distances between tokens lower the scores (ALiBi), a norm behind the embeddings, packed projections."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import bloom

ATTENTION = ("heads", "head_dim", "attend")
BLOCK = (*ATTENTION, "eps", "residual")
AXES = (
    Axis("heads", (2, 1, 6, 3, 5, 12), "attention heads (n_head); slopes have a rule of their own off powers of two"),
    Axis("head_dim", axes.HEAD_DIM.choices, "width of a head; the hidden size is as many times that"),
    Axis("eps", (1e-5, 1e-6, 1e-2), "layer_norm_epsilon"),
    Axis("residual", ("input", "normed"), "what is added to a part (apply_residual_connection_post_layernorm)"),
    axes.LAYERS,
    axes.TIE,
    axes.ATTEND,
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of BloomConfig for a point of the configuration space."""
    fields = {
        "hidden_size": int(point["heads"]) * int(point["head_dim"]),
        "n_head": point["heads"],
        "n_layer": point["layers"],
        "layer_norm_epsilon": point["eps"],
        "apply_residual_connection_post_layernorm": point["residual"] == "normed",
        "attention_dropout": 0.5,
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("bloom", **fields)


FAMILY = Family(
    model_type="bloom",
    axes=AXES,
    configure=configure,
    config=bloom.BloomConfig,
    alibi="build_alibi_tensor",
    implementations=({"_attn_implementation": "eager"},),
    layers=(
        Layer(
            "mlp",
            Kind.POINTWISE,
            "BloomMLP",
            bloom.BloomMLP,
            at="transformer.h.0.mlp.",
            axes=("heads", "head_dim"),
        ),
        Layer(
            "attention",
            Kind.ATTENTION,
            "BloomAttention",
            bloom.BloomAttention,
            at="transformer.h.0.self_attention.",
            axes=ATTENTION,
            scales=(1.0, 1e-3),
            apart=True,  # its part of a model adds the residual to what it returns
        ),
        Layer("block", Kind.ATTENTION, "BloomBlock", bloom.BloomBlock, at="transformer.h.0.", axes=BLOCK),
        Layer(
            "model",
            Kind.MODEL,
            "BloomModel",
            bloom.BloomModel,
            at="transformer.",
            axes=(*BLOCK, "layers"),
            packs=False,
        ),
        Layer(
            "logits",
            Kind.MODEL,
            "BloomForCausalLM",
            bloom.BloomForCausalLM,
            at="",
            axes=(*BLOCK, "layers", "tie"),
            packs=False,
            generates=True,
        ),
    ),
)
