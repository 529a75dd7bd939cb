"""RWKV-4: attention with scores that decay, as a recurrence; a token mixes with the one before it in both parts."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import rwkv

AXES = (
    Axis("width", (6, 3, 10, 13), "hidden_size"),
    # gap rwkv-width: with another size the reference computes, but carries no state
    Axis("inner", ("same",), "attention_hidden_size: that of the hidden states, or twice as much", undrawn=("twice",)),
    axes.SQUARE,
    Axis("eps", (1e-5, 1e-6, 1e-2), "layer_norm_epsilon; for models another one is the gap rwkv-eps"),
    Axis("rescale", (0, 1, 2), "blocks after which hidden states are halved, in evaluation (rescale_every)"),
    # gap rwkv-one-layer
    Axis("layers", (2, 3), "num_hidden_layers", undrawn=(1,)),
    axes.TIE,
)
ATTENTION = ("", "time_shift", "total", "weights", "exponent")
FEED_FORWARD = ("channel_shift", "", "", "", "")
BLOCK = ("channel_shift", *ATTENTION[1:])


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of RwkvConfig for a point of the configuration space."""
    hidden = int(point["width"])
    fields = {
        "hidden_size": hidden,
        "attention_hidden_size": hidden * (2 if point["inner"] == "twice" else 1),
        "intermediate_size": hidden if point["square"] else 15,
        "layer_norm_epsilon": point["eps"],
        "rescale_every": point["rescale"],
        "num_hidden_layers": point["layers"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("rwkv", **fields)


def _layer(name: str, kind: Kind, reference: str, candidate: Any, at: str, axes: tuple[str, ...], **more: Any) -> Layer:
    """One that carries a state. With a state the reference takes no single tokens, but of one row: gap rwkv-rows."""
    return Layer(name, kind, reference, candidate, at=at, axes=axes, masks=False, packs=False, fewest=2, **more)


FAMILY = Family(
    model_type="rwkv",
    axes=AXES,
    configure=configure,
    config=rwkv.RwkvConfig,
    turned=(),
    rules=rwkv.RwkvForCausalLM.weight_rules,
    implementations=({},),
    layers=(
        _layer(
            "attention",
            Kind.RECURRENT,
            "RwkvSelfAttention",
            rwkv.RwkvSelfAttention,
            "rwkv.blocks.0.attention.",
            ("width",),
            states=ATTENTION,
            scales=(1.0, 1e-3),
        ),
        _layer(
            "feed_forward",
            Kind.RECURRENT,
            "RwkvFeedForward",
            rwkv.RwkvFeedForward,
            "rwkv.blocks.0.feed_forward.",
            ("width", "square"),
            states=FEED_FORWARD,
            scales=(1.0, 1e-3),
        ),
        _layer(
            "block",
            Kind.RECURRENT,
            "RwkvBlock",
            rwkv.RwkvBlock,
            "rwkv.blocks.0.",
            ("width", "square", "eps"),
            states=BLOCK,
            arguments=lambda config: {"config": config, "layer_id": 0},
        ),
        _layer(
            "model",
            Kind.MODEL,
            "RwkvModel",
            rwkv.RwkvModel,
            "rwkv.",
            ("width", "square", "layers"),
            states=BLOCK,
        ),
        _layer(
            "rescaled",
            Kind.MODEL,
            "RwkvModel",
            rwkv.RwkvModel,
            "rwkv.",
            ("width", "square", "rescale", "layers"),
            states=BLOCK,
            fixed=(("rescale", 1),),
            trains=False,  # gap rwkv-rescaled
        ),
        _layer(
            "logits",
            Kind.MODEL,
            "RwkvForCausalLM",
            rwkv.RwkvForCausalLM,
            "",
            ("width", "square", "layers", "tie"),
            states=BLOCK,
            generates=True,
        ),
    ),
)
