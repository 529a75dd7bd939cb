"""How a mistake is switched on: something is exchanged as long as a context lasts.

No layer is copied: what is exchanged is a small function, a method, a field of the configuration or a tensor of the
weights as our side reads them. An `Exchange` is called to get the context, so several can be switched on together: each
then finds what the one before it left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from parity import family as families
from parity.candidate import Candidate
from parity.mistakes.places import BERT, LANGUAGE_MODELS
from parity.pair import Pair, renew_pairs
from reimpl.attention import Attention, MultiHead
from reimpl.config import Config
from reimpl.decoder import decoder_mask
from reimpl.latent_attention import LatentAttention
from reimpl.mask import CAUSAL, causal
from reimpl.rope import rotate

Function = Callable[..., Any]
Exchange = Callable[[], AbstractContextManager[Any]]
Fields = Mapping[str, Any]
Weights = Mapping[str, Tensor]

ARGUMENTS = ("ids", "valid", "positions", "cache", "embeddings")


_PLANTED: list[tuple[Exchange, ExitStack]] = []


@contextmanager
def planted(exchange: Exchange) -> Iterator[None]:
    """Something is exchanged, and our side is built anew for it, and again after it."""
    renew_pairs()
    try:
        with ExitStack() as stack:
            stack.enter_context(exchange())
            _PLANTED.append((exchange, stack))
            try:
                yield
            finally:
                _PLANTED.pop()
    finally:
        renew_pairs()


@contextmanager
def unplanted() -> Iterator[None]:
    """Nothing is exchanged as long as the context lasts. What was built before it may be used after it only."""
    for _, stack in reversed(_PLANTED):
        stack.close()
    try:
        yield
    finally:
        for exchange, stack in _PLANTED:
            stack.enter_context(exchange())


def several(*exchanges: Exchange) -> Exchange:
    """Several exchanges at once."""

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for exchange in exchanges:
                stack.enter_context(exchange())
            yield

    return enter


def exchanged(owner: Any, name: str, value: Any) -> Exchange:
    """Another function, method or attribute in the place of one."""
    return partial(patch.object, owner, name, value)


def exchanged_in(table: dict[str, Any], **functions: Function) -> Exchange:
    """Other functions in a table of functions."""
    return partial(patch.dict, table, functions)


def wrapped(owner: Any, name: str, wrap: Callable[[Function], Function]) -> Exchange:
    """A function or method made of the one whose place it takes."""
    return lambda: patch.object(owner, name, wrap(getattr(owner, name)))


def wrapped_each(owners: Iterable[Any], name: str, wrap: Callable[[Function], Function]) -> Exchange:
    """The method of that name of several classes."""
    return several(*(wrapped(owner, name, wrap) for owner in owners))


def everywhere(function: Function, wrap: Callable[[Function], Function]) -> Exchange:
    """A function of ours made of the one whose place it takes, wherever that was imported to."""
    name = function.__name__

    def enter() -> AbstractContextManager[Any]:
        ours = [module for path, module in sys.modules.items() if path.startswith("reimpl.")]
        return several(*(wrapped(module, name, wrap) for module in ours if name in vars(module)))()

    return enter


def bodies(wrap: Callable[[Function], Function]) -> Exchange:
    """Whole models compute otherwise what they compute of ids, padding, positions and a cache."""
    encoders = of_models("encode")
    others = [cls for cls in of_models("forward") if not issubclass(cls, tuple(encoders))]
    return several(wrapped_each(encoders, "encode", wrap), wrapped_each(others, "forward", wrap))


def of_models(method: str) -> list[type]:
    """The classes of ours that define a method of whole models, without their heads."""
    models: list[Any] = [families.load(name).layer("model").candidate for name in (*LANGUAGE_MODELS, *BERT)]
    definers = (next((cls for cls in model.__mro__ if method in vars(cls)), None) for model in models)
    return list(dict.fromkeys(cls for cls in definers if cls is not None))


def built(cls: type, change: Callable[[Any], Any]) -> Exchange:
    """Every new object of a class is changed once it is built."""

    def wrap(init: Function) -> Function:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            change(self)

        return call

    return wrapped(cls, "__init__", wrap)


def narrow(*modules: Any) -> Exchange:
    """What these modules compute in at least float32 they compute in the model's dtype."""
    return several(*(exchanged(module, "wide", lambda x: x.dtype) for module in modules))


def rotating(wrap: Callable[[Function], Function]) -> Exchange:
    """Every attention turns queries and keys otherwise."""
    return everywhere(rotate, wrap)


def turning(q: Function = rotate, k: Function = rotate) -> Exchange:
    """Every attention turns its queries or keys otherwise, by functions like `rotate`."""

    def of_heads(self: Any, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q(queries, cos, sin), k(keys, cos, sin)

    def of_latents(self: Any, queries: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q(self.paired(queries), cos, sin), k(self.paired(key[:, None]), cos, sin)[:, 0]

    return several(exchanged(Attention, "turn", of_heads), exchanged(LatentAttention, "turn", of_latents))


def configured(change: Callable[[Fields], Fields]) -> Exchange:
    """Our side reads other fields from the configuration; those that a family does not have it is not given."""

    def wrap(read: Function) -> Any:
        def from_dict(cls: type[Config], fields: Fields) -> Config:
            changed = {name: value for name, value in change(fields).items() if name in fields}
            return read.__func__(cls, {**fields, **changed})  # type: ignore[attr-defined]

        return classmethod(from_dict)

    return wrapped(Config, "from_dict", wrap)


def roped(change: Callable[[Fields], Fields]) -> Exchange:
    """Our side reads other rope fields from the configuration."""

    def changed(fields: Fields) -> Fields:
        rope = fields.get("rope_parameters")
        return {} if rope is None else {"rope_parameters": {**rope, **change(fields)}}

    return configured(changed)


def loaded(change: Callable[[Weights, Any], Weights]) -> Exchange:
    """Our side reads other weights from the checkpoint, by names on disk; `change` gets the configuration, too."""

    def wrap(load: Function) -> Function:
        def call(self: Pair, side: Any, weights: Weights, seed: int) -> None:
            given = {**weights, **change(weights, side.config)} if isinstance(side, Candidate) else weights
            load(self, side, given, seed)

        return call

    return wrapped(Pair, "load", wrap)


def loaded_each(ending: str, change: Callable[[Tensor, Any], Tensor]) -> Exchange:
    """Our side reads another tensor for every one whose name ends so."""
    return loaded(
        lambda weights, config: {
            name: change(weight, config) for name, weight in weights.items() if name.endswith(ending)
        }
    )


def swapped(one: str, other: str) -> Exchange:
    """Our side reads two tensors from each other's names."""

    def exchange(weights: Weights, config: Any) -> Weights:
        turned = {name: name.replace(one, other) for name in weights if one in name}
        turned |= {after: before for before, after in turned.items()}
        return {name: weights[source] for name, source in turned.items() if turned.keys() <= weights.keys()}

    return loaded(exchange)


def scored(factor: Callable[[Any], float]) -> Exchange:
    """Every attention multiplies its scores once more."""

    def wrap(method: Function) -> Function:
        def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            with patch.object(self, "scale", self.scale * factor(self)):
                return method(self, *args, **kwargs)

        return call

    return several(wrapped(MultiHead, "mix", wrap), wrapped(LatentAttention, "forward", wrap))


def masked(change: Callable[..., Fields]) -> Exchange:
    """Models make their masks of other arguments."""

    def wrap(make: Function) -> Function:
        def call(new: int, seen: int, valid: Any, positions: Any, *rest: Any) -> Any:
            given = {"new": new, "seen": seen, "valid": valid, "positions": positions}
            return make(*{**given, **change(**given)}.values(), *rest)

        return call

    return everywhere(decoder_mask, wrap)


def remasked(change: Callable[[Tensor], Tensor]) -> Exchange:
    """Models make other masks: `change` gets one as a tensor, [rows or 1, 1, queries, keys], True = may attend."""

    def wrap(make: Function) -> Function:
        def call(new: int, seen: int, *rest: Any) -> Any:
            mask = make(new, seen, *rest)
            return change(causal(new, new + seen)[None, None] if mask is CAUSAL else mask)

        return call

    return everywhere(decoder_mask, wrap)


def masking_with_cache(make: Function) -> Exchange:
    """Models that are given a cache make their masks otherwise."""

    def wrap(forward: Function) -> Function:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
            with nullcontext() if given.get("cache") is None else exchange():
                return forward(self, *args, **kwargs)

        return call

    exchange = everywhere(decoder_mask, lambda _: make)
    return bodies(wrap)


def called(change: Callable[[Fields], Fields]) -> Exchange:
    """Models are called with other arguments; `change` gets them by name."""

    def wrap(forward: Function) -> Function:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
            return forward(self, **{**given, **change(given)})

        return call

    return bodies(wrap)
