"""FNet: a Fourier transform over tokens and channels where attention was; no mask, so every token sees all others."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import fnet

BLOCK = ("width", "eps", "act", "square")
AXES = (
    Axis("width", (8, 3, 12, 30), "hidden_size"),
    Axis("eps", (1e-12, 1e-5, 1e-2), "layer_norm_eps"),
    Axis("act", ("gelu_new", "gelu", "relu", "silu"), "hidden_act"),
    axes.SQUARE,
    Axis("types", (4, 1, 2), "type_vocab_size"),
    Axis("pad", ("none", "first", "last"), "the padding token, whose embedding is not trained (pad_token_id)"),
    axes.LAYERS,
    axes.TIE,
)
NO_HALF = dict.fromkeys(
    ("bf16", "f16"), "the reference's Fourier transform knows no half precision on a CPU (half-fourier)"
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of FNetConfig for a point of the configuration space."""
    fields = {
        "hidden_size": point["width"],
        "num_hidden_layers": point["layers"],
        "intermediate_size": point["width"] if point["square"] else 44,
        "max_position_embeddings": axes.MAX_LENGTH,
        "type_vocab_size": point["types"],
        "layer_norm_eps": point["eps"],
        "hidden_act": point["act"],
        "pad_token_id": {"none": None, "first": 0, "last": sizes.SIZES["vocab_size"] - 1}[str(point["pad"])],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("fnet", **fields)


FAMILY = Family(
    model_type="fnet",
    axes=AXES,
    configure=configure,
    config=fnet.FNetConfig,
    token_types=lambda config: config.type_vocab_size,
    positions=axes.MAX_LENGTH,
    rules=fnet.FNetForMaskedLM.weight_rules,
    implementations=({},),
    layers=(
        Layer(
            "embeddings",
            Kind.EMBEDDINGS,
            "FNetEmbeddings",
            fnet.FNetEmbeddings,
            at="fnet.embeddings.",
            axes=("width", "eps", "types", "pad"),
        ),
        Layer(
            "fourier",
            Kind.MIXER,
            "FNetBasicFourierTransform",
            lambda config: fnet.FNetFourierTransform(),
            at="fnet.encoder.layer.0.fourier.self.",
            axes=("width",),
            causal=False,
            masks=False,
            left_out=NO_HALF,
        ),
        Layer(
            "block",
            Kind.MIXER,
            "FNetLayer",
            fnet.FNetLayer,
            at="fnet.encoder.layer.0.",
            axes=BLOCK,
            causal=False,
            masks=False,
            left_out=NO_HALF,
        ),
        Layer(
            "model",
            Kind.MODEL,
            "FNetModel",
            fnet.FNetModel,
            at="fnet.",
            axes=(*BLOCK, "types", "pad", "layers"),
            causal=False,
            masks=False,
            packs=False,
            left_out=NO_HALF,
        ),
        Layer(
            "logits",
            Kind.MODEL,
            "FNetForMaskedLM",
            fnet.FNetForMaskedLM,
            at="",
            axes=(*BLOCK, "types", "pad", "layers", "tie"),
            causal=False,
            masks=False,
            packs=False,
            left_out=NO_HALF,
        ),
    ),
)
