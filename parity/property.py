"""What a property is: a sentence about a layer, the scenarios it speaks about, and how one of them is judged."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from hypothesis.strategies import SearchStrategy

from parity.case import Case
from parity.compare import Judgement
from parity.family import Family, FamilyError, Layer
from parity.pair import Pair
from parity.scenario import Scenario
from parity.strategies import Pool


@dataclass(frozen=True)
class Property:
    """One property, run over every layer it applies to.

    Attributes:
        name: how it is chosen and reported.
        sentence: what holds.
        applies: whether it says anything about a layer of a family.
        scenarios: draws scenarios for a layer from a pool of configurations.
        judge: judges the candidate of a pair under a scenario.
        dtypes: the dtypes in which the property is stated.
        case: makes the tensors of a scenario, where those of the scenario alone are not what is judged.
        located: whether one run of a case can show where the sides part; else the first quantity that fails says so.
    """

    name: str
    sentence: str
    applies: Callable[[Family, Layer], bool]
    scenarios: Callable[[Family, Layer, Pool], SearchStrategy[Scenario]]
    judge: Callable[[Pair, Scenario], list[Judgement]]
    dtypes: tuple[str, ...] = ("f64", "f32", "bf16", "f16")
    case: Callable[[Pair, Scenario], Case] = Pair.case
    located: bool = True

    def stated_in(self, layer: Layer) -> tuple[str, ...]:
        """The dtypes in which it says something about a layer."""
        return tuple(name for name in self.dtypes if name not in layer.left_out)


@cache
def properties() -> dict[str, Property]:
    """All properties by name: one file each in `parity/properties`, found because it is there."""
    import parity.properties

    modules = [
        importlib.import_module(f"parity.properties.{module.name}")
        for module in pkgutil.iter_modules(parity.properties.__path__)
    ]
    return {module.PROPERTY.name: module.PROPERTY for module in modules}


def find(name: str) -> Property:
    """The property of that name.

    Raises:
        FamilyError: naming the properties there are.
    """
    if name not in properties():
        raise FamilyError(f"unknown property {name!r}; known are {', '.join(properties())}")
    return properties()[name]
