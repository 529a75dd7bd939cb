"""Qwen3's mixture of experts: normed queries and keys, a window for all layers or none, experts in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parity import axes, pre_norm
from parity.family import Axis, Family, Kind, Layer
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import qwen3_moe

EXPERTS = ("experts", "norm", "act", "square", "dispatch")
SPARSE = ("step", "only")
AXES = (
    *axes.PRE_NORM,
    axes.WINDOW,
    Axis("bias", (False, True), "biases of q, k, v and o (attention_bias)"),
    Axis("experts", ("4/2", "5/3", "8/1", "7/4"), "experts / chosen for a token"),
    axes.MANY,
    axes.DISPATCH,
    Axis("norm", (False, True), "whether the weights of the chosen sum to 1 (norm_topk_prob)"),
    Axis("step", (1, 2, 3), "every so many layers one has experts (decoder_sparse_step)"),
    Axis("only", ("none", "first", "second", "both"), "layers without experts (mlp_only_layers)"),
)


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of Qwen3MoeConfig for a point of the configuration space."""
    experts, chosen = map(int, str(point["experts"]).split("/"))
    fields = axes.pre_norm(point) | axes.lopsided(point, axes.EXPERT_UNIT)
    fields |= {
        "moe_intermediate_size": fields["hidden_size"] if point["square"] else 24,
        "use_sliding_window": bool(point["window"]),
        "sliding_window": point["window"] or None,
        "attention_bias": point["bias"],
        "num_experts": point["many"] or experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": point["norm"],
        "decoder_sparse_step": point["step"],
        "mlp_only_layers": {"none": [], "first": [0], "second": [1], "both": [0, 1]}[str(point["only"])],
    }
    return sizes.config("qwen3_moe", **fields)


def window(config: Any) -> int | None:
    """The window of every layer."""
    return config.sliding_window if config.use_sliding_window else None


DENSE = pre_norm.layers(
    qwen3_moe,
    "Qwen3Moe",
    attention=("heads", "head_dim", "bias", "rope", "theta", "window", "attend"),
    mlp=("act", "square"),
    window=window,
)
"""The layers as they would be without experts."""

MOE = Layer(
    "moe",
    Kind.POINTWISE,
    "Qwen3MoeSparseMoeBlock",
    qwen3_moe.Qwen3MoeSparseMoeBlock,
    at="model.layers.0.mlp.",
    axes=(*EXPERTS, "many"),
    scales=(1.0, 1e-3),
    routes=True,
)


def with_experts(layer: Layer) -> Layer:
    """A layer that holds others, with experts in some of them; the mlp by itself is that of a layer without."""
    if layer.name == "mlp":
        return replace(layer, fixed=(("only", "first"),))
    if layer.name in ("block", "model", "logits"):
        return replace(layer, axes=(*layer.axes, "experts", "norm", "dispatch", *SPARSE), routes=True)
    return layer


norm, rotary, mlp, attention, *holders = map(with_experts, DENSE)

FAMILY = Family(
    model_type="qwen3_moe",
    axes=AXES,
    configure=configure,
    config=qwen3_moe.Qwen3MoeConfig,
    rotary="Qwen3MoeRotaryEmbedding",
    turned=("q_proj", "k_proj", "q_norm", "k_norm"),
    rules=qwen3_moe.Qwen3MoeForCausalLM.weight_rules,
    implementations=(
        {"_attn_implementation": "eager", "_experts_implementation": "eager"},
        {"_attn_implementation": "sdpa", "_experts_implementation": "batched_mm"},
        {"_attn_implementation": "sdpa", "_experts_implementation": "grouped_mm"},
    ),
    layers=(norm, rotary, mlp, attention, MOE, *holders),
)
