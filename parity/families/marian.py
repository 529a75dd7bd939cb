"""Marian: sines and cosines in halves for positions, norms behind each sum, an encoder and a decoder that reads it."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import marian

LAYER = ("heads", "head_dim", "act", "square", "attend")
STACK = (*LAYER, "scaled", "pad", "layers")
AXES = (
    Axis("heads", ("2/4", "1/1", "6/3", "3/6"), "heads of the encoder / of the decoder"),
    Axis("head_dim", (4, 8, 3, 5), "width of the decoder's heads; d_model is as many times that as both counts need"),
    Axis("act", ("gelu", "relu", "silu", "gelu_new"), "activation_function"),
    axes.SQUARE,
    Axis("scaled", (False, True), "embeddings times sqrt(d_model) (scale_embedding)"),
    Axis("pad", ("last", "first"), "the padding token, whose embedding is not trained (pad_token_id)"),
    axes.LAYERS,
    axes.ATTEND,
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of MarianConfig for a point of the configuration space."""
    encoder, decoder = map(int, str(point["heads"]).split("/"))
    size, vocabulary = max(encoder, decoder) * int(point["head_dim"]), sizes.SIZES["vocab_size"]
    fields = {
        "d_model": size,
        "encoder_attention_heads": encoder,
        "decoder_attention_heads": decoder,
        "encoder_ffn_dim": size if point["square"] else 44,
        "decoder_ffn_dim": size if point["square"] else 52,
        "encoder_layers": point["layers"],
        "decoder_layers": point["layers"],
        "activation_function": point["act"],
        "scale_embedding": point["scaled"],
        "max_position_embeddings": axes.MAX_LENGTH,
        "decoder_vocab_size": vocabulary,
        "pad_token_id": {"first": 0, "last": vocabulary - 1}[str(point["pad"])],
        "decoder_start_token_id": vocabulary - 1,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.5),
    }
    return sizes.config("marian", **fields)


def layer(name: str, kind: Kind, reference: str, at: str, used: tuple[str, ...], **rest: Any) -> Layer:
    """A layer of this family. Norms come last, so nothing keeps large inputs from making large scores."""
    candidate = getattr(marian, reference)
    return Layer(name, kind, reference, candidate, at, used, scales=(1.0, 1e-3), packs=False, counts=True, **rest)


FAMILY = Family(
    model_type="marian",
    axes=AXES,
    configure=configure,
    config=marian.MarianConfig,
    positions=axes.MAX_LENGTH,
    layers=(
        layer("encoder_layer", Kind.ATTENTION, "MarianEncoderLayer", "model.encoder.layers.0.", LAYER, causal=False),
        layer(
            "decoder_layer", Kind.ATTENTION, "MarianDecoderLayer", "model.decoder.layers.0.", LAYER, needs_memory=True
        ),
        layer("encoder", Kind.MODEL, "MarianEncoder", "model.encoder.", STACK, causal=False),
        layer("decoder", Kind.MODEL, "MarianDecoder", "model.decoder.", STACK, needs_memory=True),
    ),
)
