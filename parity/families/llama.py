"""Llama: grouped-query attention under rotary positions, RMSNorm before each part, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes, pre_norm
from parity.family import Axis, Family
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import llama

AXES = (
    *axes.PRE_NORM,
    Axis("bias", (False, True), "biases of q, k, v and o (attention_bias)"),
    Axis("mlp_bias", (False, True), "biases of gate, up and down"),
)


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of LlamaConfig for a point of the configuration space."""
    fields = axes.pre_norm(point) | {"attention_bias": point["bias"], "mlp_bias": point["mlp_bias"]}
    return sizes.config("llama", **fields)


FAMILY = Family(
    model_type="llama",
    axes=AXES,
    configure=configure,
    config=llama.LlamaConfig,
    rotary="LlamaRotaryEmbedding",
    layers=pre_norm.layers(
        llama,
        "Llama",
        attention=("heads", "head_dim", "bias", "rope", "theta", "attend"),
        mlp=("act", "mlp_bias", "square"),
    ),
)
