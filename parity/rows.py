"""A row of a parity run, as the tests see it: a property, a layer, the dtypes asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parity import family as families
from parity.family import Family, Layer
from parity.property import Property
from parity.runner import Tally, hold


@dataclass(frozen=True)
class Row:
    """One property over one layer."""

    family: Family
    layer: Layer
    prop: Property
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.family.model_type}-{self.layer.name}"

    def holds(self) -> Tally:
        """Run the row with the number of scenarios that the Hypothesis profile says.

        Raises:
            Mismatch: the smallest that was found.
        """
        tally = hold(self.prop, self.family, self.layer, self.dtypes)
        if tally.mismatch is not None:
            raise tally.mismatch
        return tally


def rows(
    prop: Property, models: Sequence[str] = (), layers: Sequence[str] = (), dtypes: Sequence[str] = ()
) -> Iterator[Row]:
    """The rows of a property, restricted to some families, layers and dtypes where any are named."""
    for model in models or families.names():
        family = families.load(model)
        for layer in family.layers:
            wanted = not layers or layer.name in layers or layer.reference in layers
            stated = tuple(name for name in prop.stated_in(layer) if not dtypes or name in dtypes)
            if wanted and stated and prop.applies(family, layer):
                yield Row(family, layer, prop, stated)
