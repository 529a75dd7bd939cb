"""Mistral: Llama without biases, under one sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes, pre_norm
from parity.family import Family
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import mistral


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of MistralConfig for a point of the configuration space."""
    return sizes.config("mistral", **axes.pre_norm(point), sliding_window=point["window"] or None)


FAMILY = Family(
    model_type="mistral",
    axes=(*axes.PRE_NORM, axes.WINDOW),
    configure=configure,
    config=mistral.MistralConfig,
    rotary="MistralRotaryEmbedding",
    layers=pre_norm.layers(
        mistral,
        "Mistral",
        attention=("heads", "head_dim", "rope", "theta", "window", "attend"),
        mlp=("act", "square"),
        window=lambda config: config.sliding_window,
    ),
)
