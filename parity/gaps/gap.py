"""What a known gap is: a name, the versions in which it is known, a sentence, a reason, and where it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from packaging.requirements import Requirement

from parity.family import Layer
from parity.scenario import Scenario


@dataclass(frozen=True)
class Place:
    """Where a scenario leads: a layer of a model type under a configuration of the reference, and a property of it."""

    model_type: str
    layer: Layer
    config: Any
    scenario: Scenario
    prop: str


def nowhere(place: Place) -> bool:
    return False


def same(scenario: Scenario) -> Scenario:
    return scenario


@dataclass(frozen=True)
class Gap:
    """A place where the reference contradicts itself.

    Attributes:
        name: how it is called in the code that steps around it.
        where: model types and classes.
        versions: requirements, any of which says that it is known in the installed version.
        sentence: what the reference does.
        reason: the public issue, or why it does so.
        applies: whether a scenario leads there.
        outside: the nearest scenario that does not.
        avoided: the file which sees to it that no drawn scenario leads there, if one does.
    """

    name: str
    where: str
    versions: tuple[str, ...]
    sentence: str
    reason: str
    applies: Callable[[Place], bool] = nowhere
    outside: Callable[[Scenario], Scenario] = same
    avoided: str = ""

    @property
    def known(self) -> bool:
        """Whether it is recorded for what is installed."""
        return any(_installed(Requirement(each)) for each in self.versions)

    @property
    def range(self) -> str:
        """The versions in which it is known, in words."""
        return " or ".join(self.versions)

    def __str__(self) -> str:
        return f"{self.sentence} ({self.range})"


def _installed(wanted: Requirement) -> bool:
    return wanted.specifier.contains(version(wanted.name), prereleases=True)


EVERY = ("transformers>=4.57.6",)
TORCH = ("torch>=2.13",)


def without(*axes: str) -> Callable[[Scenario], Scenario]:
    """Some axes at their first choice."""
    return lambda scenario: replace(scenario, config=tuple(each for each in scenario.config if each[0] not in axes))


def in_one_chunk(scenario: Scenario) -> Scenario:
    return replace(scenario, schedule=(scenario.length,))


def unpadded(scenario: Scenario) -> Scenario:
    return replace(scenario, padding=())
