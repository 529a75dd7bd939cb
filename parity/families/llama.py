"""Llama: grouped-query attention under rotary positions, RMSNorm before each part, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import llama

ATTENTION = ("heads", "head_dim", "bias", "rope", "theta", "attend")
BLOCK = (*ATTENTION, "eps", "act", "mlp_bias", "square")
AXES = (
    axes.HEADS,
    axes.HEAD_DIM,
    Axis("bias", (False, True), "biases of q, k, v and o (attention_bias)"),
    axes.ROPE,
    axes.THETA,
    axes.EPS,
    axes.ACT,
    Axis("mlp_bias", (False, True), "biases of gate, up and down"),
    axes.SQUARE,
    axes.LAYERS,
    axes.TIE,
    axes.ATTEND,
)


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of LlamaConfig for a point of the configuration space."""
    heads, kv_heads = axes.heads(point)
    fields = axes.lopsided(point) | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": point["head_dim"],
        "attention_bias": point["bias"],
        "rope_parameters": axes.rope_parameters(point, int(point["head_dim"])),
        "max_position_embeddings": axes.MAX_LENGTH,
        "rms_norm_eps": point["eps"],
        "hidden_act": point["act"],
        "mlp_bias": point["mlp_bias"],
        "num_hidden_layers": point["layers"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("llama", **fields)


FAMILY = Family(
    model_type="llama",
    axes=AXES,
    configure=configure,
    config=llama.LlamaConfig,
    rotary="LlamaRotaryEmbedding",
    layers=(
        Layer(
            "norm",
            Kind.POINTWISE,
            "LlamaRMSNorm",
            lambda config: llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps),
            at="model.layers.0.input_layernorm.",
            axes=("eps",),
            arguments=lambda config: {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps},
        ),
        Layer(
            "rotary",
            Kind.ROTARY,
            "LlamaRotaryEmbedding",
            llama.LlamaRotaryEmbedding,
            at="model.rotary_emb.",
            axes=("head_dim", "rope", "theta"),
        ),
        Layer(
            "mlp",
            Kind.POINTWISE,
            "LlamaMLP",
            llama.LlamaMLP,
            at="model.layers.0.mlp.",
            axes=("act", "mlp_bias", "square"),
        ),
        Layer(
            "attention",
            Kind.ATTENTION,
            "LlamaAttention",
            llama.LlamaAttention,
            at="model.layers.0.self_attn.",
            axes=ATTENTION,
            scales=(1.0, 1e-3),
        ),
        Layer(
            "block",
            Kind.ATTENTION,
            "LlamaDecoderLayer",
            llama.LlamaDecoderLayer,
            at="model.layers.0.",
            axes=BLOCK,
        ),
        Layer("model", Kind.MODEL, "LlamaModel", llama.LlamaModel, at="model.", axes=(*BLOCK, "layers")),
        Layer(
            "logits",
            Kind.MODEL,
            "LlamaForCausalLM",
            llama.LlamaForCausalLM,
            at="",
            axes=(*BLOCK, "layers", "tie"),
            generates=True,
        ),
    ),
)
