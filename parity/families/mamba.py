"""Mamba: a selective state space where attention was, and no feed-forward layer beside it."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import mamba

MIXER = ("width", "state", "kernel", "rank", "bias", "conv_bias", "act")
BLOCK = (*MIXER, "eps", "residual")
AXES = (
    Axis("width", ("6/14", "4/8", "10/10", "1/3"), "hidden_size / intermediate_size"),
    Axis("state", (5, 1, 16), "state_size"),
    Axis("kernel", (4, 2, 7), "conv_kernel"),
    Axis("rank", (2, 1, 3), "time_step_rank"),
    Axis("bias", (False, True), "biases of the projections in and out (use_bias)"),
    Axis("conv_bias", (True, False), "use_conv_bias"),
    Axis("act", ("silu", "gelu", "relu"), "hidden_act"),
    Axis("eps", (1e-5, 1e-6, 1e-2), "layer_norm_epsilon"),
    Axis("residual", (True, False), "residual_in_fp32"),
    axes.LAYERS,
    axes.TIE,
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of MambaConfig for a point of the configuration space."""
    hidden, inner = map(int, str(point["width"]).split("/"))
    fields = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "state_size": point["state"],
        "conv_kernel": point["kernel"],
        "time_step_rank": point["rank"],
        "use_bias": point["bias"],
        "use_conv_bias": point["conv_bias"],
        "hidden_act": point["act"],
        "layer_norm_epsilon": point["eps"],
        "residual_in_fp32": point["residual"],
        "num_hidden_layers": point["layers"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("mamba", **fields)


def _layer(name: str, kind: Kind, reference: str, candidate: Any, at: str, axes: tuple[str, ...], **more: Any) -> Layer:
    """One that carries a state. After the first chunk the reference takes single tokens only: gap mamba-chunks."""
    states = ("convolution", "recurrence")
    return Layer(name, kind, reference, candidate, at=at, axes=axes, packs=False, states=states, most=1, **more)


FAMILY = Family(
    model_type="mamba",
    axes=AXES,
    configure=configure,
    config=mamba.MambaConfig,
    turned=(),
    rules=mamba.MambaForCausalLM.weight_rules,
    implementations=({},),
    layers=(
        Layer(
            "norm",
            Kind.POINTWISE,
            "MambaRMSNorm",
            lambda config: mamba.MambaRMSNorm(config.hidden_size, config.layer_norm_epsilon),
            at="backbone.layers.0.norm.",
            axes=("width", "eps"),
            arguments=lambda config: {"hidden_size": config.hidden_size, "eps": config.layer_norm_epsilon},
        ),
        _layer(
            "mixer",
            Kind.RECURRENT,
            "MambaMixer",
            mamba.MambaMixer,
            "backbone.layers.0.mixer.",
            MIXER,
            # With biases, tokens of 1e-3 are nearly alike: roundings do not average out in sums over them.
            scales=(1.0, 1e-3),
        ),
        _layer("block", Kind.RECURRENT, "MambaBlock", mamba.MambaBlock, "backbone.layers.0.", BLOCK),
        _layer("model", Kind.MODEL, "MambaModel", mamba.MambaModel, "backbone.", (*BLOCK, "layers")),
        _layer(
            "logits",
            Kind.MODEL,
            "MambaForCausalLM",
            mamba.MambaForCausalLM,
            "",
            (*BLOCK, "layers", "tie"),
            generates=True,
        ),
    ),
)
