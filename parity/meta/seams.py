"""What a planted mistake is, and how it is planted: something is exchanged as long as a context lasts.

No layer is copied: a fault takes the place of a small function, a method, a field of the configuration or of the
weights as our side reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.candidate import Candidate
from parity.pair import Pair, pair_of
from reimpl import decoder
from reimpl.attention import MultiHead
from reimpl.llama import LlamaConfig

Function = Callable[..., Any]
Exchange = AbstractContextManager[Any]
Fields = Mapping[str, Any]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: what our layer then does, as a person would say it.
        layers: the layers of the family whose ordinary runs must catch it.
        parts: the quantities of the mistaken part, at one of which the two sides must be said to part; empty if one run
            of both cannot show it.
        exchange: what makes our layer do so.
        unseen: a scenario of the first layer in which it changes nothing; empty if there is none so simple.
        verdicts: the only verdicts that can see it.
        prop: the property whose scenarios must catch it.
        dtype: the dtype in which it shows.
    """

    name: str
    layers: tuple[str, ...]
    parts: tuple[str, ...]
    exchange: Exchange
    unseen: str = ""
    verdicts: tuple[str, ...] = ("output", "cache")
    prop: str = "forward"
    dtype: str = "f64"

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Our layers make the mistake as long as the context lasts; they are built anew for it, and after it."""
        pair_of.cache_clear()
        try:
            with self.exchange:
                yield
        finally:
            pair_of.cache_clear()


class Several(ExitStack):
    """Several exchanges at once, to be entered again and again."""

    def __init__(self, *exchanges: Exchange) -> None:
        super().__init__()
        self._exchanges = exchanges

    def __enter__(self) -> Several:
        for exchange in self._exchanges:
            self.enter_context(exchange)
        return self


def exchanged(owner: Any, name: str, function: Any) -> Exchange:
    """Another function or method in the place of one."""
    return patch.object(owner, name, function)


def exchanged_in(table: dict[str, Any], **functions: Function) -> Exchange:
    """Other functions in a table of functions."""
    return patch.dict(table, functions)


def wrapped(owner: Any, name: str, wrap: Callable[[Function], Function]) -> Exchange:
    """A function or method made of the one whose place it takes."""
    return patch.object(owner, name, wrap(getattr(owner, name)))


def built(cls: type, change: Callable[[Any], None]) -> Exchange:
    """Every new object of a class is changed once it is built."""

    def wrap(init: Function) -> Function:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            change(self)

        return call

    return wrapped(cls, "__init__", wrap)


def configured(change: Callable[[Fields], Fields]) -> Exchange:
    """Our side reads other fields from the configuration."""
    return wrapped(LlamaConfig, "from_dict", lambda read: lambda fields: read({**fields, **change(fields)}))


def roped(change: Callable[[Fields], Fields]) -> Exchange:
    """Our side reads other rope fields from the configuration."""
    return configured(lambda fields: {"rope_parameters": {**fields["rope_parameters"], **change(fields)}})


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
    return wrapped(MultiHead, "mix", lambda mix: lambda self, q, k, v, mask: mix(self, q * factor(self), k, v, mask))


def masked(change: Callable[..., Mapping[str, Any]]) -> Exchange:
    """A model makes its masks of other arguments."""

    def wrap(make: Function) -> Function:
        def call(new: int, seen: int, valid: Any, positions: Any, *rest: Any) -> Any:
            given = {"new": new, "seen": seen, "valid": valid, "positions": positions}
            return make(*{**given, **change(**given)}.values(), *rest)

        return call

    return wrapped(decoder, "decoder_mask", wrap)


def called(cls: type, change: Callable[[Fields], Fields]) -> Exchange:
    """The forward of a model gets other arguments; `change` gets them by name."""

    def wrap(forward: Function) -> Function:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(("ids", "valid", "positions", "cache", "embeddings"), args, strict=False)) | kwargs
            return forward(self, **{**given, **change(given)})

        return call

    return wrapped(cls, "forward", wrap)
