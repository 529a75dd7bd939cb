"""The original Transformer, held against torch.nn: post-norm or pre-norm, and every way torch can be called."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from reimpl import transformer
from reimpl.cache import Cache
from reimpl.mask import Mask, MemoryMask

SIZES = ("heads", "head_dim", "bias")
CALLS = ("batch_first", "masking")
ATTENTION = (*SIZES, *CALLS, "weights", "attend")
LAYER = (*SIZES, *CALLS, "norm_first", "eps", "act", "square", "attend")
AXES = (
    Axis("heads", (2, 1, 6, 3), "attention heads (nhead)"),
    Axis("head_dim", axes.HEAD_DIM.choices, "width of a head; d_model is as many times that"),
    Axis("bias", (True, False), "biases of all linear layers and norms"),
    Axis("norm_first", (False, True), "norms before each part, or behind each sum"),
    Axis("eps", (1e-5, 1e-6, 1e-2), "layer_norm_eps"),
    Axis("act", ("relu", "gelu"), "activation"),
    axes.SQUARE,
    Axis("layers", ("1/1", "2/1", "1/2", "2/2"), "layers of the encoder / of the decoder"),
    Axis("final_norm", (True, False), "whether a stack ends in a norm"),
    Axis("batch_first", (True, False), "the layout in which torch is called"),
    Axis("masking", ("float", "boolean", "split", "split_float", "hint"), "how torch is told who sees whom"),
    Axis("added", (False, True), "numbers added to the scores, as torch's mask can hold them"),
    Axis("weights", (False, True), "whether torch is asked for the weights (need_weights)"),
    Axis("fast", (False, True), "whether torch may take its fast path, for evaluation"),
    axes.ATTEND,
)


def configure(point: Point) -> dict[str, Any]:
    """The arguments of torch.nn.Transformer for a point of the configuration space, and how torch is called."""
    size = int(point["heads"]) * int(point["head_dim"])
    encoder, decoder = map(int, str(point["layers"]).split("/"))
    return {
        "model_type": "transformer",
        "d_model": size,
        "nhead": point["heads"],
        "num_encoder_layers": encoder,
        "num_decoder_layers": decoder,
        "dim_feedforward": size if point["square"] else 44,
        "dropout": 0.5,
        "activation": point["act"],
        "layer_norm_eps": point["eps"],
        "norm_first": point["norm_first"],
        "final_norm": point["final_norm"],
        "bias": point["bias"],
        "calls": {name: point[name] for name in ("batch_first", "masking", "added", "weights", "fast")},
    }


def attention_arguments(config: Any) -> dict[str, Any]:
    """What nn.MultiheadAttention is built with."""
    sizes = {"embed_dim": config.d_model, "num_heads": config.nhead, "dropout": config.dropout, "bias": config.bias}
    return sizes | {"batch_first": config.calls["batch_first"]}


FIELDS = ("d_model", "nhead", "dim_feedforward", "dropout", "activation", "layer_norm_eps", "norm_first", "bias")


def layer_arguments(config: Any) -> dict[str, Any]:
    """What nn.TransformerEncoderLayer and nn.TransformerDecoderLayer are built with."""
    return {name: getattr(config, name) for name in FIELDS} | {"batch_first": config.calls["batch_first"]}


def stack_arguments(config: Any, what: str) -> dict[str, Any]:
    """What nn.TransformerEncoder and nn.TransformerDecoder are built with."""
    layer = getattr(nn, f"Transformer{what.capitalize()}Layer")(**layer_arguments(config))
    norm = nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias) if config.final_norm else None
    return {f"{what}_layer": layer, "num_layers": getattr(config, f"num_{what}_layers"), "norm": norm}


def model_arguments(config: Any) -> dict[str, Any]:
    """What nn.Transformer is built with."""
    layers = {name: getattr(config, name) for name in ("num_encoder_layers", "num_decoder_layers")}
    return layer_arguments(config) | layers


class FromSource(nn.Module):
    """The whole model, called as what attends to a memory: the source stands in its place."""

    def __init__(self, config: transformer.TransformerConfig) -> None:
        super().__init__()
        model = transformer.Transformer(config)
        self.encoder, self.decoder = model.encoder, model.decoder
        self.run, self.make_cache = model.forward, model.make_cache

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask = None,
        memory_mask: MemoryMask = None,
        cache: Cache | None = None,
    ) -> Tensor:
        seen = None if memory_mask is None else memory_mask[:, :, :1].expand(-1, -1, memory.shape[1], -1)
        return self.run(memory, x, seen, mask, memory_mask, cache)


def width(config: Any) -> int:
    """Channels of what every layer is called with."""
    return config.d_model


def layer(name: str, kind: Kind, reference: str, candidate: Any, at: str, axes: tuple[str, ...], **rest: Any) -> Layer:
    """A layer of this family. Norms may come last, so large inputs would make large scores."""
    return Layer(name, kind, reference, candidate, at, axes, width=width, caches=False, scales=(1.0, 1e-3), **rest)


FAMILY = Family(
    model_type="transformer",
    library="torch",
    axes=AXES,
    configure=configure,
    config=transformer.TransformerConfig,
    implementations=({"sdpa": "math"}, {"sdpa": "fused"}),
    layers=(
        layer(
            "ffn",
            Kind.POINTWISE,
            "TransformerEncoderLayer._ff_block",
            transformer.FFN,
            "encoder.layers.0.",
            (*SIZES, "act", "square"),
            arguments=layer_arguments,
        ),
        layer(
            "attention",
            Kind.ATTENTION,
            "MultiheadAttention",
            transformer.MultiheadAttention,
            "encoder.layers.0.self_attn.",
            (*ATTENTION, "added", "fast"),
            arguments=attention_arguments,
            causal=False,
        ),
        layer(
            "causal_attention",
            Kind.ATTENTION,
            "MultiheadAttention",
            transformer.MultiheadAttention,
            "decoder.layers.0.self_attn.",
            (*ATTENTION, "added", "fast"),
            arguments=attention_arguments,
        ),
        layer(
            "cross_attention",
            Kind.CROSS,
            "MultiheadAttention",
            transformer.MemoryAttention,
            "decoder.layers.0.multihead_attn.",
            ATTENTION,
            arguments=attention_arguments,
        ),
        layer(
            "encoder_layer",
            Kind.ATTENTION,
            "TransformerEncoderLayer",
            transformer.TransformerEncoderLayer,
            "encoder.layers.0.",
            (*LAYER, "fast"),
            arguments=layer_arguments,
            causal=False,
        ),
        layer(
            "decoder_layer",
            Kind.ATTENTION,
            "TransformerDecoderLayer",
            transformer.TransformerDecoderLayer,
            "decoder.layers.0.",
            LAYER,
            arguments=layer_arguments,
            needs_memory=True,
        ),
        layer(
            "encoder",
            Kind.ATTENTION,
            "TransformerEncoder",
            transformer.TransformerEncoder,
            "encoder.",
            (*LAYER, "layers", "final_norm", "fast"),
            arguments=lambda config: stack_arguments(config, "encoder"),
            causal=False,
        ),
        layer(
            "decoder",
            Kind.ATTENTION,
            "TransformerDecoder",
            transformer.TransformerDecoder,
            "decoder.",
            (*LAYER, "layers", "final_norm"),
            arguments=lambda config: stack_arguments(config, "decoder"),
            needs_memory=True,
        ),
        layer(
            "model",
            Kind.ATTENTION,
            "Transformer",
            FromSource,
            "",
            (*LAYER, "layers", "fast"),
            arguments=model_arguments,
            needs_memory=True,
        ),
    ),
)
