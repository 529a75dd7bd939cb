"""The families and layers that the catalogue speaks of, by what they are made of."""

from __future__ import annotations

from parity import family as families
from parity.family import Family
from reimpl.attention import Attention, MultiHead
from reimpl.decoder import CausalLM, Decoder
from reimpl.feedforward import GatedFeedForward
from reimpl.latent_attention import LatentAttention


def those(has: type | str) -> tuple[str, ...]:
    """The families that have a layer or an axis of some name, or a layer of some class of ours, new ones too."""
    return tuple(name for name in families.names() if _has(families.load(name), has))


def _has(family: Family, has: type | str) -> bool:
    if isinstance(has, str):
        return has in {layer.name for layer in family.layers} | {axis.name for axis in family.axes}
    return any(isinstance(layer.candidate, type) and issubclass(layer.candidate, has) for layer in family.layers)


GROUPED = tuple(name for name in those(Attention) if "rope" in {axis.name for axis in families.load(name).axes})
"""Grouped heads, rotated by tables: Llama and its descendants."""
LATENT = those(LatentAttention)
ROTARY = those("rotary")
RMS = those("norm")
GATED = those(GatedFeedForward)
DECODERS = those(Decoder)
LANGUAGE_MODELS = those(CausalLM)
HEADS = those(MultiHead)
WINDOWED = those("window")

ATTENDING = ("attention", "block", "decoder_block", "model", "decoder_model")
BLOCKS = ("block", "decoder_block", "model", "decoder_model")
MODELS = ("model", "decoder_model", "logits")
TABLES = ("rotary", "model")
NORMS = ("norm", "block", "model")
