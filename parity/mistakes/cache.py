"""What is kept of the tokens seen, and what a later step makes of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, DECODERS, GROUPED, LANGUAGE_MODELS, MODELS
from parity.mistakes.seams import Function, exchanged, masked, of_models, several, wrapped_each
from reimpl.cache import Cache, GrowingCache, SlidingCache

KIND = "cache"
ONE_CHUNK = "b1 s4"


def newest_first(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return tuple(held.roll(keys.shape[-2], dims=-2) for held in append(self, keys, values))

    return call


def newest_only(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        append(self, keys, values)
        return keys, values

    return call


def keys_for_values(append: Function) -> Function:
    return lambda self, keys, values: append(self, values, keys)[::-1]


def once(make_cache: Function) -> Function:
    """Every call gives the cache that the first call made for a model."""
    made: dict[Any, Any] = {}

    def call(self: Any, capacity: int | None = None) -> Any:
        if self not in made:
            made[self] = make_cache(self, capacity)
        return made[self]

    return call


MISTAKES = (
    Mistake(
        "puts new keys before those in the cache",
        wrapped_each((GrowingCache, SlidingCache), "append", newest_first),
        (Place(GROUPED, ATTENDING, "b1 s3,2", ONE_CHUNK),),
        ("weights", "scores"),
        "a chunk of several tokens after others in the cache",
    ),
    Mistake(
        "attends to the new keys only",
        several(wrapped_each((GrowingCache, SlidingCache), "append", newest_only), masked(lambda **_: {"seen": 0})),
        (Place(GROUPED, MODELS, "b1 s3,1", ONE_CHUNK),),
        ("scores", "weights"),
        "a chunk after others in the cache",
    ),
    Mistake(
        "stores keys as values and values as keys",
        wrapped_each((GrowingCache, SlidingCache), "append", keys_for_values),
        (Place(GROUPED, ATTENDING, "b1 s2"),),
        ("cached k",),
        "any cache that is looked into: no output shows it",
        verdicts=("cache",),
    ),
    Mistake(
        "goes on with the cache of the prompt before",
        wrapped_each(of_models("make_cache"), "make_cache", once),
        (Place(LANGUAGE_MODELS, ("model",), "b1 s3"),),
        ("cached k", "cos", "wpe", "q after rotation", "k after rotation", "scores", "weights"),
        "any second prompt on the same model",
        prop="rows",
        source="Lightning-AI/litgpt#1596",
    ),
    Mistake(
        "gives every layer the cache of the first",
        exchanged(Cache, "__getitem__", lambda self, index: self.layers[0]),
        (Place(DECODERS, MODELS, "layers=2 b1 s3", "layers=1 b1 s4"),),
        ("cached k", "scores", "weights"),
        "more than one layer",
    ),
)
