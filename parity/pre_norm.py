"""The layers that Llama and its descendants have alike, beside their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parity.family import Kind, Layer


def _no_window(config: Any) -> int | None:
    return None


def layers(
    ours: Any,
    prefix: str,
    *,
    attention: Sequence[str],
    mlp: Sequence[str],
    window: Callable[[Any], int | None] = _no_window,
) -> tuple[Layer, ...]:
    """Norm, rotary tables, mlp, attention, block, model and logits of a family.

    Args:
        ours: the module of reimpl that holds them.
        prefix: what the names of the classes begin with, on both sides.
        attention, mlp: the axes that matter to these two; the layers that hold them add their own.
        window: the sliding window of the first layer.
    """
    block = (*attention, "eps", *mlp)

    def layer(name: str, kind: Kind, suffix: str, at: str, axes: Sequence[str], **others: Any) -> Layer:
        return Layer(name, kind, prefix + suffix, getattr(ours, prefix + suffix), at, tuple(axes), **others)

    return (
        Layer(
            "norm",
            Kind.POINTWISE,
            f"{prefix}RMSNorm",
            lambda config: getattr(ours, f"{prefix}RMSNorm")(config.hidden_size, config.rms_norm_eps),
            at="model.layers.0.input_layernorm.",
            axes=("eps",),
            arguments=lambda config: {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps},
        ),
        layer("rotary", Kind.ROTARY, "RotaryEmbedding", "model.rotary_emb.", ("head_dim", "rope", "theta")),
        layer("mlp", Kind.POINTWISE, "MLP", "model.layers.0.mlp.", mlp),
        layer(
            "attention",
            Kind.ATTENTION,
            "Attention",
            "model.layers.0.self_attn.",
            attention,
            scales=(1.0, 1e-3),
            window=window,
        ),
        layer("block", Kind.ATTENTION, "DecoderLayer", "model.layers.0.", block, window=window),
        layer("model", Kind.MODEL, "Model", "model.", (*block, "layers"), window=window),
        layer("logits", Kind.MODEL, "ForCausalLM", "", (*block, "layers", "tie"), window=window, generates=True),
    )
