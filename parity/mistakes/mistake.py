"""An entry of the catalogue: what goes wrong, in which layers, how it is switched on, and under what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from parity import family as families
from parity.family import Layer
from parity.mistakes.seams import Exchange, planted


@dataclass(frozen=True)
class Place:
    """Layers of some families in which a mistake can be made.

    Attributes:
        families: their model types.
        layers: the layers whose ordinary runs must catch it, the lowest first; a family may lack some of them.
        shows: a scenario of the lowest layer under which it must show.
        unseen: one in which it changes nothing; empty if there is none so simple.
    """

    families: tuple[str, ...]
    layers: tuple[str, ...]
    shows: str
    unseen: str = ""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: what the layer then does, as a person would say it.
        exchange: what makes our layer do so, as long as the context lasts.
        places: where it can be made.
        parts: the quantities of the mistaken part, at one of which the two sides must be said to part; empty if one run
            of both cannot show it.
        trigger: the situation without which it cannot be seen; "any ..." where it always shows.
        verdicts: the only verdicts that can see it, beside the routing that it leads to.
        prop: the property whose scenarios must catch it.
        dtype: the dtype in which it shows.
        source: the public report of it, `repository#number`.
        remedy: where a transformation of the weights mends it, that transformation, as a line to paste; `weights` is
            the state dict.
        kind: what kind of mistake it is; its file says so.
    """

    name: str
    exchange: Exchange
    places: tuple[Place, ...]
    parts: tuple[str, ...]
    trigger: str
    verdicts: tuple[str, ...] = ("output", "cache")
    prop: str = "forward"
    dtype: str = "f64"
    source: str = ""
    remedy: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def where(self) -> dict[str, tuple[str, ...]]:
        """The layers that can make it, by model type, the lowest first."""
        return {
            model_type: tuple(layer.name for layer in families.load(model_type).layers if layer.name in place.layers)
            for place in self.places
            for model_type in place.families
        }

    def verdicts_of(self, layer: Layer) -> frozenset[str]:
        """The only verdicts that can see it in a layer: where one routes, what goes into a router is wrong, too."""
        routing = {"routing"} if layer.routes and "output" in self.verdicts else set()
        return frozenset(self.verdicts) | routing

    def place(self, model_type: str) -> Place:
        """Where a family can make it.

        Raises:
            KeyError: if it cannot.
        """
        return next(place for place in self.places if model_type in place.families)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Our layers make the mistake as long as the context lasts; they are built anew for it, and after it."""
        with planted(self.exchange):
            yield
