"""RankMixer, held against its formula: tokens exchange slices, and each has a feed-forward layer of its own."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from reimpl import rankmixer

BLOCK = ("tokens", "slice", "inner", "act", "eps", "norm_first")
AXES = (
    Axis("tokens", (3, 1, 5, 8), "tokens of a row, and slices of a token (num_tokens)"),
    Axis("slice", (4, 1, 3), "width of a slice; hidden_size is as many times that as there are tokens"),
    Axis("inner", (7, 2, 12), "intermediate_size"),
    Axis("act", ("gelu", "relu", "silu"), "hidden_act"),
    Axis("eps", (1e-5, 1e-6, 1e-2), "layer_norm_eps"),
    Axis("norm_first", (False, True), "norms after the sums, as in the paper, or in front of the mixers"),
    axes.LAYERS,
)


def configure(point: Point) -> dict[str, Any]:
    """The fields of RankMixerConfig for a point of the configuration space."""
    return {
        "model_type": "rankmixer",
        "num_tokens": point["tokens"],
        "hidden_size": int(point["tokens"]) * int(point["slice"]),
        "intermediate_size": point["inner"],
        "num_hidden_layers": point["layers"],
        "hidden_act": point["act"],
        "layer_norm_eps": point["eps"],
        "norm_first": point["norm_first"],
    }


def _mixer(name: str, reference: str, candidate: Any, at: str, axes: tuple[str, ...], **more: Any) -> Layer:
    return Layer(name, Kind.MIXER, reference, candidate, at=at, axes=axes, causal=False, masks=False, **more)


FAMILY = Family(
    model_type="rankmixer",
    axes=AXES,
    configure=configure,
    config=rankmixer.RankMixerConfig,
    library="formula",
    tokens=lambda point: int(point["tokens"]),
    turned=(),
    implementations=({"kernel": False}, {"kernel": True}),
    layers=(
        _mixer(
            "mixing",
            "RankTokenMixing",
            lambda config: rankmixer.TokenMixing(),
            "layers.0.token_mixer.",
            ("tokens", "slice"),
        ),
        _mixer(
            "ffn",
            "RankPerTokenFfn",
            rankmixer.PerTokenFeedForward,
            "layers.0.channel_mixer.",
            ("tokens", "slice", "inner", "act"),
            scales=(1.0, 1e-3),
        ),
        _mixer("block", "RankMixerBlock", rankmixer.RankMixerBlock, "layers.0.", BLOCK, scales=(1.0, 1e-3)),
        _mixer("model", "RankMixer", rankmixer.RankMixer, "", (*BLOCK, "layers"), scales=(1.0, 1e-3)),
    ),
)
