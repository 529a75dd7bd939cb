"""Gaps of attention: norms, caches, masks, rotary frequencies."""

from __future__ import annotations

from dataclasses import replace

from parity.family import Kind
from parity.gaps.gap import EVERY, Gap, Place, in_one_chunk, without
from parity.scenario import Scenario

# Norms


def _another_eps(place: Place) -> bool:
    return place.model_type == "deepseek_v3" and place.layer.kind.attends and place.config.rms_norm_eps != 1e-6


LATENT_EPS = Gap(
    "latent-eps",
    "deepseek_v3: DeepseekV3Attention and all that hold it",
    EVERY,
    "the norms of the latents take 1e-6 for their epsilon, while all others take rms_norm_eps",
    "transformers#44261; so does the code that the model was published with",
    _another_eps,
    without("eps"),
)

# Caches and masks


def _window_of_one(place: Place) -> bool:
    config, layer = place.config, place.layer
    if not layer.kind.attends or getattr(config, "sliding_window", None) != 1:
        return False
    return layer.kind is Kind.MODEL or layer.window(config) == 1


def _two_wide(scenario: Scenario) -> Scenario:
    others = tuple(each for each in scenario.config if each[0] != "window")
    return replace(scenario, config=(*others, ("window", 2)))


WINDOW_OF_ONE = Gap(
    "window-of-one",
    "mistral, mixtral, qwen2, qwen3: what attends, with DynamicCache(config)",
    EVERY,
    "the cache of a window of 1 keeps every token, not none, so that a decoding step sees them all and a chunk fails",
    "what is kept is sliced from -window + 1, which is 0, so from the start",
    _window_of_one,
    _two_wide,
    "parity/axes.py",
)

PACKED_CACHE = Gap(
    "packed-cache",
    "all models that are called with position_ids",
    EVERY,
    "positions that begin anew keep documents apart in a call without mask and cache only",
    "transformers#46634: meant for training without padding",
    lambda place: place.layer.kind is Kind.MODEL and bool(place.scenario.packing) and len(place.scenario.schedule) > 1,
    in_one_chunk,
    "parity/strategies.py",
)

EMPTY_ROW = Gap(
    "empty-row",
    "all models under padding, eager against sdpa",
    EVERY,
    "a query that may see no key gets the average of all values from eager, zeros from sdpa",
    "eager adds the dtype's least number to every score, after which all are alike",
    avoided="parity/case.py",
)

NO_MASK = Gap(
    "no-mask",
    "attention and blocks called on their own, eager against sdpa",
    EVERY,
    "without a mask eager lets a token see those after it, sdpa does not",
    "sdpa takes a missing mask for a causal one, eager for none",
    avoided="parity/case.py",
)

BOOLEAN_MASK = Gap(
    "boolean-mask",
    "attention and blocks called on their own, eager against sdpa",
    EVERY,
    "a boolean mask is heeded by sdpa, while eager adds it to the scores as 0 and 1",
    "a whole model makes each its own kind of mask",
    avoided="parity/case.py",
)

# Rotary frequencies


_LENGTH = "max_position_embeddings"


def _rescaled(place: Place, rope_type: str) -> bool:
    """Whether chunks are held against one pass by a model, which makes its own tables, and are turned otherwise.

    Chunk by chunk the reference is well defined; it is the two that contradict each other.
    """
    rope, limit = getattr(place.config, "rope_parameters", None) or {}, getattr(place.config, _LENGTH, 0)
    if place.prop != "chunks" or place.layer.kind is not Kind.MODEL or rope.get("rope_type") != rope_type:
        return False
    first, last = (place.scenario.offset + length for length in (place.scenario.schedule[0], place.scenario.length))
    if rope_type == "dynamic":
        return first < last and last > limit
    return first <= rope.get("original_max_position_embeddings", limit) < last


DYNAMIC_CHUNKS = Gap(
    "dynamic-chunks",
    "all models with rope_type dynamic",
    EVERY,
    "keys cached before the length passed the limit keep other frequencies than one pass gives them",
    "transformers#25104: the frequencies follow from the length so far, the cache holds rotated keys",
    lambda place: _rescaled(place, "dynamic"),
    in_one_chunk,
    "parity/properties/chunks.py",
)

DYNAMIC_HISTORY = Gap(
    "dynamic-history",
    "all models with rope_type dynamic",
    ("transformers>=4.57.6,<5", "transformers>=5.13"),
    "past the limit a prompt gets the frequencies of the longest that the module ever saw",
    "transformers#25306: computed anew for a longer prompt, reset by one within the limit, but never less",
    avoided="parity/pair.py",
)

LONGROPE_CHUNKS = Gap(
    "longrope-chunks",
    "all models with rope_type longrope",
    EVERY,
    "keys cached before the length passed the original limit keep the short factors, one pass gives them the long ones",
    "transformers#33129: Phi-3 drops its cache there while it generates; other models do not",
    lambda place: _rescaled(place, "longrope"),
    in_one_chunk,
    "parity/properties/chunks.py",
)

PARTIAL_ROTARY = Gap(
    "partial-rotary",
    "llama and its descendants: rotary tables",
    ("transformers>=5.6",),
    "the default rope type ignores partial_rotary_factor, every other one heeds it",
    "since version 5 each model has a default type of its own",
    avoided="parity/test_rope_tables.py",
)

HALF_BUFFERS = Gap(
    "half-buffers",
    "all models with rotary tables",
    EVERY,
    "model.to(bfloat16) rounds the rotary frequencies, from_pretrained(dtype=bfloat16) does not",
    "a cast takes buffers along, loading writes parameters only",
    avoided="parity/reference.py",
)
