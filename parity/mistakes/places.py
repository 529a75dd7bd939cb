"""The families and layers that the catalogue speaks of, by what they are made of."""

from __future__ import annotations

from parity import family as families
from parity import reference
from parity.family import Family
from reimpl.attention import Attention, MultiHead
from reimpl.decoder import CausalLM, Decoder
from reimpl.feedforward import GatedFeedForward
from reimpl.latent_attention import LatentAttention
from reimpl.qwen3 import Qwen3Attention


def those(has: type | str) -> tuple[str, ...]:
    """The families that have a layer or an axis of some name, or a layer of some class of ours, new ones too."""
    return tuple(name for name in families.names() if _has(families.load(name), has))


def _has(family: Family, has: type | str) -> bool:
    if isinstance(has, str):
        return has in {layer.name for layer in family.layers} | {axis.name for axis in family.axes}
    return any(isinstance(layer.candidate, type) and issubclass(layer.candidate, has) for layer in family.layers)


def axes_of(name: str) -> set[str]:
    """The axes of a family's configuration space."""
    return {axis.name for axis in families.load(name).axes}


def _both(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in one if name in other)


ROTARY = those("rotary")
GROUPED = _both(those(Attention), ROTARY)
"""Grouped heads, rotated: Llama and its descendants."""
LATENT = those(LatentAttention)
NORMED_HEADS = those(Qwen3Attention)
HEADS = tuple(name for name in those(MultiHead) if families.load(name).library == "transformers")
"""Not torch's: it forms scores within a kernel, where no report can point at them."""
RMS = tuple(name for name in those("norm") if families.load(name).layer("norm").reference.endswith("RMSNorm"))
GATED = those(GatedFeedForward)
DECODERS = those(Decoder)
LANGUAGE_MODELS = tuple(name for name in those(CausalLM) if "attend" in axes_of(name))
"""Those that generate text and attend to what they have seen; states that are no keys have mistakes of their own."""
PACKING = tuple(name for name in LANGUAGE_MODELS if families.load(name).layer("model").packs)
POSITIONED = tuple(name for name in LANGUAGE_MODELS if name in ROTARY or families.load(name).positions is not None)
UNROUTED = tuple(name for name in LANGUAGE_MODELS if not families.load(name).layer("model").routes)
LEARNED = tuple(name for name in POSITIONED if name not in ROTARY)
WINDOWED = _both(those("window"), DECODERS)
LAYERED_WINDOWS = those("first_window")

SOFTMAX_ROUTED = tuple(name for name in those("moe") if name not in LATENT)
RENORMALISING = tuple(name for name in SOFTMAX_ROUTED if "norm" not in axes_of(name))
"""Routers whose weights always sum to 1; those of the others do where the configuration says so."""
SOMETIMES_RENORMALISING = tuple(name for name in SOFTMAX_ROUTED if name not in RENORMALISING)
BALANCED = tuple(name for name in SOFTMAX_ROUTED if reference.balance_loss(name) is not None)
JITTERED = those("jitter")
ALIBI = tuple(name for name in LANGUAGE_MODELS if families.load(name).alibi is not None)
GPT2, BERT, LLAMA = ("gpt2",), ("bert",), ("llama",)

ATTENDING = ("attention", "block", "decoder_block", "model", "decoder_model")
BLOCKS = ("block", "decoder_block", "model", "decoder_model")
MODELS = ("model", "logits")
BERT_DECODER = ("decoder_model",)
CROSSING = ("cross_attention", "block", "decoder_block", "model", "decoder_model")
TABLES = ("rotary", "model")
NORMS = ("norm", "block", "model")
FEED_FORWARD = ("mlp", *BLOCKS)
EXPERTS = ("moe", "block", "model")
