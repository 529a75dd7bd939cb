"""Qwen2: biases of q, k and v, a window from some layer on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes, pre_norm
from parity.family import Family
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import qwen2


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of Qwen2Config for a point of the configuration space."""
    fields = axes.pre_norm(point) | axes.layered_window(point)
    return sizes.config("qwen2", **fields)


FAMILY = Family(
    model_type="qwen2",
    axes=(*axes.PRE_NORM, axes.WINDOW, axes.FIRST_WINDOW),
    configure=configure,
    config=qwen2.Qwen2Config,
    rotary="Qwen2RotaryEmbedding",
    layers=pre_norm.layers(
        qwen2,
        "Qwen2",
        attention=("heads", "head_dim", "rope", "theta", "window", "first_window", "attend"),
        mlp=("act", "square"),
        window=axes.first_layer_window,
    ),
)
