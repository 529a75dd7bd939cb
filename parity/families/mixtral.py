"""Mixtral: grouped-query attention with an optional window, and experts that a softmax router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import mixtral

ATTENTION = ("heads", "head_dim", "rope", "theta", "window", "attend")
EXPERTS = ("experts", "act", "jitter", "square", "dispatch")
BLOCK = (*ATTENTION, *EXPERTS, "eps")
AXES = (
    axes.HEADS,
    axes.HEAD_DIM,
    axes.ROPE,
    axes.THETA,
    axes.WINDOW,
    Axis("experts", ("4/2", "5/3", "8/1", "7/4"), "experts / chosen for a token"),
    axes.MANY,
    axes.DISPATCH,
    axes.JITTER,
    axes.EPS,
    axes.ACT,
    axes.SQUARE,
    axes.LAYERS,
    axes.TIE,
    axes.ATTEND,
)


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of MixtralConfig for a point of the configuration space."""
    heads, kv_heads = axes.heads(point)
    experts, chosen = map(int, str(point["experts"]).split("/"))
    fields = axes.lopsided(point, axes.EXPERT_UNIT) | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": point["head_dim"],
        "rope_parameters": axes.rope_parameters(point, int(point["head_dim"])),
        "max_position_embeddings": axes.MAX_LENGTH,
        "sliding_window": point["window"] or None,
        "num_local_experts": point["many"] or experts,
        "num_experts_per_tok": chosen,
        "router_jitter_noise": point["jitter"],
        "rms_norm_eps": point["eps"],
        "hidden_act": point["act"],
        "num_hidden_layers": point["layers"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("mixtral", **fields)


FAMILY = Family(
    model_type="mixtral",
    axes=AXES,
    configure=configure,
    config=mixtral.MixtralConfig,
    rotary="MixtralRotaryEmbedding",
    rules=mixtral.MixtralForCausalLM.weight_rules,
    implementations=(
        {"_attn_implementation": "eager", "_experts_implementation": "eager"},
        {"_attn_implementation": "sdpa", "_experts_implementation": "batched_mm"},
        {"_attn_implementation": "sdpa", "_experts_implementation": "grouped_mm"},
    ),
    layers=(
        Layer(
            "norm",
            Kind.POINTWISE,
            "MixtralRMSNorm",
            lambda config: mixtral.MixtralRMSNorm(config.hidden_size, config.rms_norm_eps),
            at="model.layers.0.input_layernorm.",
            axes=("eps",),
            arguments=lambda config: {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps},
        ),
        Layer(
            "rotary",
            Kind.ROTARY,
            "MixtralRotaryEmbedding",
            mixtral.MixtralRotaryEmbedding,
            at="model.rotary_emb.",
            axes=("head_dim", "rope", "theta"),
        ),
        Layer(
            "attention",
            Kind.ATTENTION,
            "MixtralAttention",
            mixtral.MixtralAttention,
            at="model.layers.0.self_attn.",
            axes=ATTENTION,
            scales=(1.0, 1e-3),
            window=lambda config: config.sliding_window,
        ),
        Layer(
            "moe",
            Kind.POINTWISE,
            "MixtralSparseMoeBlock",
            mixtral.MixtralSparseMoeBlock,
            at="model.layers.0.block_sparse_moe.",
            axes=(*EXPERTS, "many"),
            scales=(1.0, 1e-3),
            routes=True,
        ),
        Layer(
            "block",
            Kind.ATTENTION,
            "MixtralDecoderLayer",
            mixtral.MixtralDecoderLayer,
            at="model.layers.0.",
            axes=BLOCK,
            window=lambda config: config.sliding_window,
            routes=True,
        ),
        Layer(
            "model",
            Kind.MODEL,
            "MixtralModel",
            mixtral.MixtralModel,
            at="model.",
            axes=(*BLOCK, "layers"),
            window=lambda config: config.sliding_window,
            routes=True,
        ),
        Layer(
            "logits",
            Kind.MODEL,
            "MixtralForCausalLM",
            mixtral.MixtralForCausalLM,
            at="",
            axes=(*BLOCK, "layers", "tie"),
            window=lambda config: config.sliding_window,
            generates=True,
            routes=True,
        ),
    ),
)
