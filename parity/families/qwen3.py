"""Qwen3: queries and keys normed in each head, a window from some layer on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes, pre_norm
from parity.family import Axis, Family
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import qwen3

BIAS = Axis("bias", (False, True), "biases of q, k, v and o (attention_bias)")


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of Qwen3Config for a point of the configuration space."""
    fields = axes.pre_norm(point) | axes.layered_window(point) | {"attention_bias": point["bias"]}
    return sizes.config("qwen3", **fields)


FAMILY = Family(
    model_type="qwen3",
    axes=(*axes.PRE_NORM, axes.WINDOW, axes.FIRST_WINDOW, BIAS),
    configure=configure,
    config=qwen3.Qwen3Config,
    rotary="Qwen3RotaryEmbedding",
    turned=("q_proj", "k_proj", "q_norm", "k_norm"),
    layers=pre_norm.layers(
        qwen3,
        "Qwen3",
        attention=("heads", "head_dim", "bias", "rope", "theta", "window", "first_window", "attend"),
        mlp=("act", "square"),
        window=axes.first_layer_window,
    ),
)
