"""What is kept of the tokens seen, and what a later step makes of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import (
    ATTENDING,
    BERT,
    BERT_DECODER,
    CROSSING,
    GPT2,
    GROUPED,
    HEADS,
    LANGUAGE_MODELS,
    LATENT,
    MODELS,
    UNROUTED,
)
from parity.mistakes.seams import (
    Exchange,
    Function,
    exchanged,
    masked,
    of_models,
    remasked,
    several,
    wrapped,
    wrapped_each,
)
from reimpl.attention import Attention
from reimpl.cache import Cache, CrossCache, GrowingCache, LatentCache, LayerCache, SlidingCache

KIND = "cache"
ONE_CHUNK = "b1 s4"
ATTENDED = ("scores", "weights")
CACHED = ("cached k", "cached v", "kv_b_proj", *ATTENDED)
KEEPING = (GrowingCache, SlidingCache, LatentCache)
"""The caches of a layer's own tokens, each with a method of its own to add some."""
EMPTY = 3  # slots of a static cache that nothing was written to


def whole_models(shows: str, unseen: str = "") -> tuple[Place, ...]:
    return Place(LANGUAGE_MODELS, MODELS, shows, unseen), Place(BERT, BERT_DECODER, shows, unseen)


def layers_with_caches(shows: str, unseen: str = "") -> tuple[Place, ...]:
    """Attention and all that holds it, where a token sees none after it."""
    decoder = ("decoder_block", "decoder_model")
    return Place((*HEADS, *LATENT), ATTENDING, shows, unseen), Place(BERT, decoder, shows, unseen)


def after(*operations: str) -> tuple[str, ...]:
    """What a layer's cache is called after something was done to it."""
    layers = ("layer 0", "layer 1", "output")
    parts = (" keys", " values", "")
    contents = tuple(f"{layer}{part} after {what}" for what in operations for layer in layers for part in parts)
    return (*contents, *(f"tokens held after {what}" for what in operations), "reuse")


def reused(shows: str) -> tuple[Place, ...]:
    """Layers of which something is done to a cache; the seed of a scenario says what."""
    unseen, decoder = f"{ONE_CHUNK} #1", ("decoder_block", "decoder_model")  # one chunk, then another prompt
    return Place(UNROUTED, ("attention", "model"), shows, unseen), Place(BERT, decoder, shows, unseen)


def adding(wrap: Function, *caches: type) -> Exchange:
    """Caches add the keys and values of new tokens otherwise."""
    return wrapped_each(caches or KEEPING, "append", wrap)


def newest_first(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return tuple(held.roll(keys.shape[-2], dims=-2) for held in append(self, keys, values))

    return call


def newest_only(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        append(self, keys, values)
        return keys, values

    return call


def without_newest(append: Function) -> Function:
    """New tokens are kept, and seen from the next step on: this one sees the last of those before in their place."""

    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        new, before = keys.shape[-2], self.length
        held = append(self, keys, values)
        if not before:
            return held
        index = torch.arange(held[0].shape[-2]).clamp(max=held[0].shape[-2] - new - 1)
        return tuple(each.index_select(-2, index) for each in held)

    return call


def keys_for_values(append: Function) -> Function:
    return lambda self, keys, values: append(self, values, keys)[::-1]


def along_the_heads(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.length:
            return append(self, keys, values)
        self._hold(*(torch.cat(both, dim=1) for both in zip(self.held, (keys, values), strict=True)))
        self.length += keys.shape[-2]
        return self.held

    return call


def with_empty_slots(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.nn.functional.pad(held, (0, 0, 0, EMPTY)) for held in append(self, keys, values))

    return call


def seeing_empty_slots(mask: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (0, EMPTY), value=True)


def store_unrotated(forward: Function) -> Function:
    """Keys enter the cache before they are rotated, and are read as though they had been."""

    def call(self: Any, x: Tensor, rotary: Any = None, mask: Any = None, cache: Any = None) -> Tensor:
        if cache is None or rotary is None:
            return forward(self, x, rotary, mask, cache)
        plain, append = self.project(x)[1], cache.append

        def store(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            held, values = append(plain, values)
            return torch.cat((held[..., : held.shape[-2] - keys.shape[-2], :], keys), dim=-2), values

        with patch.object(cache, "append", store):
            return forward(self, x, rotary, mask, cache)

    return call


def once(make_cache: Function) -> Function:
    """Every call gives the cache that the first call made for a model."""
    made: dict[Any, Any] = {}

    def call(self: Any, capacity: int | None = None) -> Any:
        if self not in made:
            made[self] = make_cache(self, capacity)
        return made[self]

    return call


def keep_the_tail(self: Any, length: int, held: int) -> None:
    """The count goes back, and what lies behind it stays."""
    self.length = length


def project_again(self: Any, project: Function) -> tuple[Tensor, Tensor]:
    """Whatever is given as memory in a later step takes the place of what is cached."""
    self.reset()
    return self.append(*project())


MISTAKES = (
    Mistake(
        "puts new keys before those in the cache",
        adding(newest_first),
        layers_with_caches("b1 s3,2", ONE_CHUNK),
        CACHED,
        "a chunk of several tokens after others in the cache",
    ),
    Mistake(
        "attends to the new keys only",
        several(adding(newest_only), masked(lambda **_: {"seen": 0})),
        whole_models("b1 s3,1", ONE_CHUNK),
        CACHED,
        "a chunk after others in the cache",
    ),
    Mistake(
        "attends to the cache as it was before the new keys",
        adding(without_newest),
        layers_with_caches("b1 s3,1", ONE_CHUNK),
        CACHED,
        "a chunk after others in the cache",
    ),
    Mistake(
        "stores keys as values and values as keys",
        adding(keys_for_values, GrowingCache, SlidingCache),
        (Place(HEADS, ATTENDING, "b1 s2"),),
        CACHED,
        "any cache that is looked into: no output shows it",
        verdicts=("cache",),
    ),
    Mistake(
        "appends along the axis of the heads",
        adding(along_the_heads, GrowingCache, SlidingCache),
        (Place(HEADS, ATTENDING, "b1 s2,1", ONE_CHUNK),),
        (*CACHED, "o_proj", "context"),
        "a chunk after others in the cache",
    ),
    Mistake(
        "caches keys before they are rotated",
        wrapped(Attention, "forward", store_unrotated),
        (Place(GROUPED, ATTENDING, "b1 s3,1"),),
        CACHED,
        "any cache; in outputs, a chunk after others",
    ),
    Mistake(
        "attends to slots of the cache that are empty",
        several(adding(with_empty_slots), remasked(seeing_empty_slots)),
        whole_models("b1 s3"),
        CACHED,
        "any step with a cache that has room",
        source="huggingface/transformers#30400",
    ),
    Mistake(
        "gives every layer the cache of the first",
        exchanged(Cache, "__getitem__", lambda self, index: self.layers[0]),
        whole_models("layers=2 b1 s3", "layers=1 b1 s4"),
        CACHED,
        "more than one layer",
    ),
    Mistake(
        "goes on with the cache of the prompt before",
        wrapped_each(of_models("make_cache"), "make_cache", once),
        (Place(UNROUTED, ("model",), "b1 s3 #1"),),
        after("a reset", "another prompt"),
        "any second prompt on the same model",
        prop="reuse",
        source="Lightning-AI/litgpt#1596",
    ),
    Mistake(
        "leaves a stale tail behind a crop",
        exchanged(LayerCache, "_crop", keep_the_tail),
        reused("b1 s3,2 #0"),
        after("a crop"),
        "a cache that is cropped",
        prop="reuse",
    ),
    Mistake(
        "ignores a crop",
        exchanged(LayerCache, "crop", lambda self, length: None),
        reused("b1 s3,2 #0"),
        after("a crop"),
        "a cache that is cropped",
        prop="reuse",
    ),
    Mistake(
        "ignores a reset",
        wrapped(LayerCache, "reset", lambda reset: lambda self: None if hasattr(self, "length") else reset(self)),
        reused("b1 s3,2 #2"),
        after("a reset"),
        "a cache that is reset, and goes on",
        prop="reuse",
        source="Lightning-AI/litgpt#1596",
    ),
    Mistake(
        "ignores another order of the rows",
        exchanged(LayerCache, "reorder", lambda self, index: None),
        reused("b2 s3,2 #1"),
        after("another order of rows"),
        "a cache whose rows are put into another order, as in beam search",
        prop="reuse",
        source="huggingface/transformers#46612",
    ),
    Mistake(
        "turns another order of the rows round",
        wrapped(LayerCache, "reorder", lambda reorder: lambda self, index: reorder(self, index.argsort())),
        reused("b3 s3,2 #1"),
        after("another order of rows"),
        "three rows whose order is no exchange of two",
        prop="reuse",
    ),
    Mistake(
        "overwrites the cached memory in each step",
        exchanged(CrossCache, "recall", project_again),
        (
            Place(GPT2, CROSSING, "cross=yes b1 s3,1 m3", "cross=yes b1 s4 m3"),
            Place(
                BERT,
                ("cross_attention", "decoder_block", "decoder_model"),
                "b1 s3,1 m3",
                "b1 s4 m3",
            ),
        ),
        CACHED,
        "a memory, and a chunk after the first",
        source="huggingface/transformers#46612",
    ),
)
