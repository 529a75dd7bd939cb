"""MLP-Mixer, held against its formula: a feed-forward layer over the tokens of rows that all have one length."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from reimpl import mlp_mixer

BLOCK = ("tokens", "width", "mlps", "act", "eps")
AXES = (
    Axis("tokens", (3, 1, 5, 8), "tokens of a row (num_patches)"),
    Axis("width", (6, 3, 10), "hidden_size"),
    Axis("mlps", ("7/11", "2/3", "5/5"), "tokens_mlp_dim / channels_mlp_dim"),
    Axis("patch", (12, 4), "numbers of a patch (patch_size)"),
    Axis("act", ("gelu", "relu", "silu"), "hidden_act"),
    Axis("eps", (1e-6, 1e-5, 1e-2), "layer_norm_eps"),
    axes.LAYERS,
    Axis("labels", (5, 1), "num_labels"),
)


def configure(point: Point) -> dict[str, Any]:
    """The fields of MlpMixerConfig for a point of the configuration space."""
    tokens_mlp, channels_mlp = map(int, str(point["mlps"]).split("/"))
    return {
        "model_type": "mlp_mixer",
        "num_patches": point["tokens"],
        "hidden_size": point["width"],
        "tokens_mlp_dim": tokens_mlp,
        "channels_mlp_dim": channels_mlp,
        "num_hidden_layers": point["layers"],
        "patch_size": point["patch"],
        "num_labels": point["labels"],
        "hidden_act": point["act"],
        "layer_norm_eps": point["eps"],
    }


def _mixer(name: str, reference: str, candidate: Any, at: str, axes: tuple[str, ...], **more: Any) -> Layer:
    return Layer(name, Kind.MIXER, reference, candidate, at=at, axes=axes, causal=False, masks=False, **more)


def _token_mlp(config: Any) -> mlp_mixer.TokenFeedForward:
    return mlp_mixer.TokenFeedForward(config.num_patches, config.tokens_mlp_dim, config.hidden_act)


FAMILY = Family(
    model_type="mlp_mixer",
    axes=AXES,
    configure=configure,
    config=mlp_mixer.MlpMixerConfig,
    library="formula",
    tokens=lambda point: int(point["tokens"]),
    turned=(),
    implementations=({"kernel": False}, {"kernel": True}),
    layers=(
        _mixer(
            "token_mlp",
            "MixerTokenMlp",
            _token_mlp,
            "layers.0.token_mixer.",
            ("tokens", "width", "mlps", "act"),
            scales=(1.0, 1e-3),
        ),
        _mixer("block", "MixerLayer", mlp_mixer.MixerLayer, "layers.0.", BLOCK),
        _mixer(
            "model",
            "MlpMixer",
            mlp_mixer.MlpMixer,
            "",
            (*BLOCK, "layers", "patch", "labels"),
            width=lambda config: config.patch_size,
        ),
    ),
)
