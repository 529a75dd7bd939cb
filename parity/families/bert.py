"""BERT: three embeddings, LayerNorm after each part, every token seeing every other; a causal decoder on request."""

from __future__ import annotations

from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import bert

ATTENTION = ("heads", "head_dim", "eps", "attend")
BLOCK = (*ATTENTION, "act", "square")
AXES = (
    Axis("heads", (2, 1, 6, 3), "attention heads (num_attention_heads)"),
    Axis("head_dim", axes.HEAD_DIM.choices, "width of a head; the hidden size is as many times that"),
    Axis("eps", (1e-12, 1e-5, 1e-2), "layer_norm_eps"),
    Axis("act", ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh"), "hidden_act"),
    axes.SQUARE,
    Axis("types", (2, 1, 5), "type_vocab_size"),
    Axis("pad", ("none", "first", "last"), "the padding token, whose embedding is not trained (pad_token_id)"),
    axes.LAYERS,
    axes.TIE,
    Axis("decoder", (False, True), "a token sees only those before it (is_decoder)"),
    Axis("cross", (False, True), "attention to an encoder's memory (add_cross_attention)"),
    axes.ATTEND,
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of BertConfig for a point of the configuration space."""
    hidden = int(point["heads"]) * int(point["head_dim"])
    fields = {
        "hidden_size": hidden,
        "num_attention_heads": point["heads"],
        "num_hidden_layers": point["layers"],
        "intermediate_size": hidden if point["square"] else 44,
        "max_position_embeddings": axes.MAX_LENGTH,
        "type_vocab_size": point["types"],
        "layer_norm_eps": point["eps"],
        "hidden_act": point["act"],
        "pad_token_id": {"none": None, "first": 0, "last": sizes.SIZES["vocab_size"] - 1}[str(point["pad"])],
        "is_decoder": point["decoder"],
        "add_cross_attention": point["cross"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("bert", **fields)


# Norms come last, so nothing keeps large inputs from making large scores.
MODERATE = (1.0, 1e-3)
DECODER = (("decoder", True),)

FAMILY = Family(
    model_type="bert",
    axes=AXES,
    configure=configure,
    config=bert.BertConfig,
    memory=lambda point: bool(point["cross"]),
    token_types=lambda config: config.type_vocab_size,
    positions=axes.MAX_LENGTH,
    layers=(
        Layer(
            "embeddings",
            Kind.EMBEDDINGS,
            "BertEmbeddings",
            bert.BertEmbeddings,
            at="bert.embeddings.",
            axes=("heads", "head_dim", "eps", "types", "pad"),
        ),
        Layer(
            "intermediate",
            Kind.POINTWISE,
            "BertIntermediate",
            bert.BertIntermediate,
            at="bert.encoder.layer.0.intermediate.",
            axes=("heads", "head_dim", "act", "square"),
        ),
        Layer(
            "attention",
            Kind.ATTENTION,
            "BertAttention",
            bert.BertAttention,
            at="bert.encoder.layer.0.attention.",
            axes=ATTENTION,
            scales=MODERATE,
            causal=False,
        ),
        Layer(
            "cross_attention",
            Kind.CROSS,
            "BertAttention",
            bert.BertMemoryAttention,
            at="bert.encoder.layer.0.crossattention.",
            axes=ATTENTION,
            arguments=lambda config: {"config": config, "is_cross_attention": True, "layer_idx": 0},
            scales=MODERATE,
        ),
        Layer(
            "block",
            Kind.ATTENTION,
            "BertLayer",
            bert.BertLayer,
            at="bert.encoder.layer.0.",
            axes=BLOCK,
            scales=MODERATE,
            causal=False,
        ),
        Layer(
            "decoder_block",
            Kind.ATTENTION,
            "BertLayer",
            bert.BertLayer,
            at="bert.encoder.layer.0.",
            axes=(*BLOCK, "cross"),
            scales=MODERATE,
            fixed=DECODER,
        ),
        Layer(
            "pooler",
            Kind.POINTWISE,
            "BertPooler",
            bert.BertPooler,
            at="bert.pooler.",
            axes=("heads", "head_dim"),
        ),
        Layer(
            "model",
            Kind.MODEL,
            "BertModel",
            bert.BertModel,
            at="bert.",
            axes=(*BLOCK, "types", "pad", "layers"),
            causal=False,
            packs=False,
        ),
        Layer(
            "decoder_model",
            Kind.MODEL,
            "BertModel",
            bert.BertModel,
            at="bert.",
            axes=(*BLOCK, "types", "pad", "layers", "cross"),
            fixed=DECODER,
            packs=False,
        ),
        Layer(
            "logits",
            Kind.MODEL,
            "BertForMaskedLM",
            bert.BertForMaskedLM,
            at="",
            axes=(*BLOCK, "types", "pad", "layers", "tie"),
            causal=False,
            packs=False,
        ),
    ),
)
