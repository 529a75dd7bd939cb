"""GPT-2: learned positions, LayerNorm before each part, packed queries, keys and values, matrices stored [in, out]."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import gpt2

ATTENTION = ("heads", "head_dim", "scaled", "by_layer", "upcast", "attend")
BLOCK = (*ATTENTION, "eps", "act", "inner", "cross")
AXES = (
    Axis("heads", (2, 1, 6, 3), "attention heads (n_head)"),
    Axis("head_dim", axes.HEAD_DIM.choices, "width of a head; the hidden size is as many times that"),
    Axis("scaled", (True, False), "scores over sqrt(head_dim) (scale_attn_weights)"),
    Axis("by_layer", (False, True), "scores over the layer's number (scale_attn_by_inverse_layer_idx)"),
    Axis("upcast", (False, True), "scores in float32 (reorder_and_upcast_attn)"),
    Axis("eps", (1e-5, 1e-6, 1e-2), "layer_norm_epsilon"),
    Axis("act", ("gelu_new", "gelu", "relu", "silu", "gelu_fast", "quick_gelu"), "activation_function"),
    Axis("inner", ("wide", "default", "square"), "n_inner: 44, four times the hidden size, or the hidden size"),
    Axis("cross", (False, True), "attention to an encoder's memory (add_cross_attention)"),
    axes.LAYERS,
    axes.TIE,
    axes.ATTEND,
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of GPT2Config for a point of the configuration space."""
    hidden = int(point["heads"]) * int(point["head_dim"])
    fields = {
        "n_embd": hidden,
        "n_head": point["heads"],
        "n_layer": point["layers"],
        "n_inner": {"wide": 44, "default": None, "square": hidden}[str(point["inner"])],
        "n_positions": axes.MAX_LENGTH,
        "activation_function": point["act"],
        "layer_norm_epsilon": point["eps"],
        "scale_attn_weights": point["scaled"],
        "scale_attn_by_inverse_layer_idx": point["by_layer"],
        "reorder_and_upcast_attn": point["upcast"],
        "add_cross_attention": point["cross"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("gpt2", **fields)


SECOND = (("layers", 2),)
"""Layers are the second of two, as the first cannot show a scale that depends on the number."""

FAMILY = Family(
    model_type="gpt2",
    axes=AXES,
    configure=configure,
    config=gpt2.GPT2Config,
    memory=lambda point: bool(point["cross"]),
    token_types=lambda config: config.vocab_size,
    positions=axes.MAX_LENGTH,
    exact={"reorder_and_upcast_attn": False},  # it insists on float32 there: gap gpt2-upcast
    layers=(
        Layer(
            "mlp",
            Kind.POINTWISE,
            "GPT2MLP",
            gpt2.GPT2MLP,
            at="transformer.h.0.mlp.",
            axes=("heads", "head_dim", "act", "inner"),
            arguments=lambda config: {"intermediate_size": config.n_inner or 4 * config.n_embd, "config": config},
        ),
        Layer(
            "attention",
            Kind.ATTENTION,
            "GPT2Attention",
            lambda config: gpt2.GPT2Attention(config, layer_idx=1),
            at="transformer.h.1.attn.",
            axes=ATTENTION,
            scales=(1.0, 1e-3),
            fixed=SECOND,
            index=1,
        ),
        Layer(
            "cross_attention",
            Kind.CROSS,
            "GPT2Attention",
            lambda config: gpt2.GPT2CrossAttention(config, layer_idx=1),
            at="transformer.h.1.crossattention.",
            axes=ATTENTION,
            arguments=lambda config: {"config": config, "is_cross_attention": True, "layer_idx": 1},
            scales=(1.0, 1e-3),
            fixed=SECOND,
            index=1,
        ),
        Layer(
            "block",
            Kind.ATTENTION,
            "GPT2Block",
            lambda config: gpt2.GPT2Block(config, layer_idx=1),
            at="transformer.h.1.",
            axes=BLOCK,
            fixed=SECOND,
            index=1,
        ),
        Layer("model", Kind.MODEL, "GPT2Model", gpt2.GPT2Model, at="transformer.", axes=(*BLOCK, "layers")),
        Layer(
            "logits",
            Kind.MODEL,
            "GPT2LMHeadModel",
            gpt2.GPT2LMHeadModel,
            at="",
            axes=(*BLOCK, "layers", "tie"),
            generates=True,
        ),
    ),
)
