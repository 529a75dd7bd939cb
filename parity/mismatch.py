"""A mismatch, and how it is printed: where, how large, the smallest scenario, and the line that shows it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch

from parity import family as families
from parity import property as properties
from parity.case import Case
from parity.compare import Judgement, worst
from parity.diagnose import Diagnosis, diagnose, diagnose_precision, find_repair
from parity.family import Family, Layer
from parity.gaps import GAPS, Gap, Place
from parity.mistakes import of
from parity.pair import Pair, pair_of
from parity.patterns import describe, tellings
from parity.property import Property
from parity.repairs import Repair
from parity.scenario import DTYPE_NAMES, DTYPES, AxisValue, Scenario
from parity.sources import source_of
from parity.trace import Divergence, locate
from parity.watch import Name

FEW = 40  # mistakes, of which trying all pairs takes some seconds
SHOWN = 4  # names in one enumeration
MEASURED = ("output", "cache", "gradient")  # verdicts whose error is a distance from the truth
NAMES = {short: name for name, short in DTYPE_NAMES.items() if name != short}


class Mismatch(AssertionError):
    """The candidate is not the reference's function, as one scenario shows."""

    def __init__(
        self, prop: Property, family: Family, layer: Layer, scenario: Scenario, failure: str | Sequence[Judgement]
    ) -> None:
        self.prop, self.family, self.layer, self.scenario = prop, family, layer, scenario
        self.failure = failure
        super().__init__(prop.name, family.model_type, layer.name, str(scenario))

    def __reduce__(self) -> tuple[Any, ...]:
        """What another process is told: names, the scenario, and what was judged."""
        return _mismatch, (self.prop.name, self.family.model_type, self.layer.name, self.scenario, self.failure)

    @property
    def place(self) -> Place:
        """Where its scenario leads."""
        return Place(self.family.model_type, self.layer, self._pair.reference_config, self.scenario, self.prop.name)

    @property
    def failed(self) -> list[Judgement]:
        """The judgements that do not hold."""
        return [] if isinstance(self.failure, str) else [j for j in self.failure if not j.holds]

    @property
    def verdicts(self) -> list[str]:
        """The verdicts that do not hold, in the order they were judged."""
        return list(dict.fromkeys(judgement.quantity.verdict for judgement in self.failed))

    @cached_property
    def smallest(self) -> Scenario:
        """The scenario in the one dtype that shows the mismatch."""
        failed = worst(self.failed)
        return self.scenario if failed is None else self.scenario.only(failed.dtype)

    @cached_property
    def divergence(self) -> Divergence | None:
        """Where the two sides first part, as far as it is known: from a run in float64 or from what was judged."""
        if not self.prop.located:
            if isinstance(self.failure, str):
                return Divergence(Name(self.prop.name), self.failure)
            return next((_told(failed) for failed in self.failed), None)
        backward = "gradient" in self.verdicts or isinstance(self.failure, str)
        located = (locate(self._pair, case, backward) for case in self._cases())
        return next(filter(None, located), None) or next(map(_remark, self._remarkable), None)

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """What the error looks like, as far as a run in float64 shows it."""
        return describe(self._pair, self._cases())

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The mistakes that explain it, as far as they are known."""
        if "precision" in self.verdicts:
            coarsest = max(self.scenario.dtypes, key=lambda name: torch.finfo(DTYPES[name]).eps)
            return diagnose_precision(self._pair, self.scenario, coarsest)
        dtypes = {judgement.dtype for judgement in self.failed} or {"f64"}
        dtype = "f64" if "f64" in dtypes else self.smallest.dtypes[0]
        few = len(of(self.family.model_type, self.layer.name)) <= FEW
        depth = 2 if few and self.failed else 1  # where nothing could be judged, pairs would be tried for nothing
        return diagnose(self._pair, self.scenario, self.prop, dtype=dtype, pair_at=self._pair_at, depth=depth)

    @cached_property
    def repair(self) -> Repair | None:
        """What to do to the weights, where that mends it; not asked where the cause is known to lie elsewhere."""
        causes = self.diagnosis.causes
        if not {"output", "cache"} & set(self.verdicts) or (causes and not any(cause.remedies for cause in causes)):
            return None
        owner = self.divergence.quantity.owner if self.divergence else ""
        return find_repair(self._pair, self.scenario.only("f64"), self.prop, within=f".{owner}." if owner else "")

    def comes_of_the_same_as(self, other: Mismatch) -> bool:
        """Whether it is in the same family, and the mistake that explains the other explains it, too.

        Where nothing is known to explain the other, whether both first part at the same quantity.
        """
        if self.family is not other.family:
            return False
        if other.diagnosis.causes and other.diagnosis.base == "ours":
            return self.is_explained_by(other.diagnosis)
        parts = [mismatch.divergence and mismatch.divergence.quantity.name for mismatch in (self, other)]
        return self.verdicts == other.verdicts and parts[0] is not None and parts[0] == parts[1]

    def is_explained_by(self, diagnosis: Diagnosis) -> bool:
        """Whether what explains another mismatch explains this one, too."""
        dtype, mine = self.smallest.dtypes[0], of(self.family.model_type, self.layer.name)
        for cause in diagnosis.causes:
            if set(cause.mistakes) <= set(mine):
                known = cause.mistakes
                return bool(
                    diagnose(
                        self._pair, self.scenario, self.prop, dtype=dtype, known=known, pair_at=self._pair_at
                    ).causes
                )
        return False

    def _pair_at(self, config: tuple[tuple[str, AxisValue], ...]) -> Pair:
        return pair_of(self.family.model_type, self.layer.name, config)

    def _cases(self) -> Iterator[Case]:
        scenarios: Iterable[Scenario] = tellings(self.scenario, self.family)
        if not self.layer.caches:  # then the reference can be watched in one pass only
            scenarios = (replace(each, schedule=(each.length,)) for each in scenarios)
        return (self.prop.case(self._pair, scenario) for scenario in scenarios)

    @property
    def _remarkable(self) -> list[Judgement]:
        """What fails without being a distance from the truth."""
        return [judgement for judgement in self.failed if judgement.quantity.verdict not in MEASURED]

    @property
    def _pair(self) -> Pair:
        return pair_of(self.family.model_type, self.layer.name, self.scenario.config)

    @property
    def told(self) -> tuple[str, list[tuple[str, str]]]:
        """Its headline, and its lines by their labels."""
        return self._headline(), list(self._lines())

    def __str__(self) -> str:
        headline, lines = self.told
        return "\n".join([headline, *(f"  {label:<9} {text}" for label, text in lines)])

    @property
    def _version(self) -> str:
        return source_of(self.family).version()

    def _headline(self) -> str:
        what = " and ".join(self.verdicts) or "candidate"
        verb = "differ" if len(self.verdicts) > 1 else "differs"
        return f"{self.family.model_type} / {self.layer.reference}   {what} {verb} from {self._version}"

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "claim", self.prop.sentence
        if isinstance(self.failure, str):
            yield "what", self.failure
        yield "where", self._where()
        measured = [judgement for judgement in self.failed if judgement.quantity.verdict in MEASURED]
        largest = worst(measured)
        if largest is not None:
            yield "size", _size(largest)
        if self.patterns:
            yield "outputs", ", ".join(self.patterns)
        if others := _others(measured, largest):
            yield "also", _few(others)
        yield from self._cause()
        yield "smallest", as_call(self.smallest)
        yield "again", self.again

    def _cause(self) -> Iterator[tuple[str, str]]:
        yield "cause", str(self.diagnosis)
        if self.repair is not None:
            yield "fix", str(self.repair)

    def _where(self) -> str:
        known = [self.divergence, *map(_remark, self._remarkable)]
        if sentences := dict.fromkeys(each.where for each in known if each is not None):
            return "; ".join(sentences)
        if all(judgement.dtype != "f64" for judgement in self.failed):
            return "unknown: in float64 both sides are the same throughout, so they part in precision only"
        return "unknown: one run of both sides is the same throughout"

    @property
    def again(self) -> str:
        """The command that shows it again."""
        return (
            f"parity run {self.family.model_type} --layer {self.layer.name} --property {self.prop.name} "
            f"--scenario '{self.smallest}'"
        )


class Inconsistent(Mismatch):
    """A mismatch where the reference contradicts itself, gone right outside of that gap: nobody is to blame."""

    def __init__(self, mismatch: Mismatch, gap: Gap) -> None:
        super().__init__(mismatch.prop, mismatch.family, mismatch.layer, mismatch.scenario, mismatch.failure)
        self.gap = gap

    def __reduce__(self) -> tuple[Any, ...]:
        return _inconsistent, (*super().__reduce__()[1], self.gap.name)

    def _headline(self) -> str:
        what = " and ".join(self.verdicts) or "result"
        layer = f"{self.family.model_type} / {self.layer.reference}"
        return f"{layer}   {what} in a known gap of {self._version}: {self.gap.name}"

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "claim", self.prop.sentence
        yield "gap", f"the reference is inconsistent here: {self.gap}"
        yield "reason", self.gap.reason
        if isinstance(self.failure, str):
            yield "what", self.failure
        if largest := worst([judgement for judgement in self.failed if judgement.quantity.verdict in MEASURED]):
            yield "size", _size(largest)
        yield "smallest", as_call(self.smallest)
        yield "again", self.again


def _others(measured: Sequence[Judgement], largest: Judgement | None) -> list[str]:
    """What else is wrong, each quantity once, whatever the steps and dtypes in which it is."""
    steps: dict[str, set[int]] = {}
    for judgement in measured:
        if largest is None or judgement.quantity.name != largest.quantity.name:
            steps.setdefault(judgement.quantity.name, set()).add(judgement.quantity.step)
    return [f"{name} in {len(found)} steps" if len(found) > 1 else name for name, found in steps.items()]


def _size(failed: Judgement) -> str:
    if not failed.allowed:
        return f"{failed.error:g}, and none is allowed ({failed.quantity})"
    times = f"{failed.ratio:.0e} times the allowance of {failed.allowed:.0e}"
    return f"{failed.error:.2g} relative, {times} ({failed.quantity}, {NAMES[failed.dtype]})"


def _told(failed: Judgement) -> Divergence:
    """Where a property whose quantities are named for the place says that the sides part."""
    quantity = Name(failed.quantity.name)
    return Divergence(quantity, f"first departs at {failed.quantity}")


def _remark(failed: Judgement) -> Divergence:
    """What there is to say of a judgement which is no distance from the truth."""
    quantity = Name(failed.quantity.name)
    if failed.quantity.verdict != "precision":
        return Divergence(quantity, str(failed.quantity))
    used, wanted = (_dtype_of(eps) for eps in (failed.error, failed.allowed))
    return Divergence(quantity, f"{quantity} in {used}, where the reference takes {wanted}")


def _dtype_of(eps: float) -> str:
    return next(NAMES[name] for name, dtype in DTYPES.items() if torch.finfo(dtype).eps == eps)


def _few(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def as_call(scenario: Scenario) -> str:
    """The scenario as a call, with the fields that are not at their default."""
    default = Scenario()
    values = {field.name: getattr(scenario, field.name) for field in fields(Scenario)}
    shown = [f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name)]
    return f"Scenario({', '.join(shown)})"


def _mismatch(prop: str, model: str, layer: str, scenario: Scenario, failure: str | Sequence[Judgement]) -> Mismatch:
    family = families.load(model)
    return Mismatch(properties.find(prop), family, family.layer(layer), scenario, failure)


def _inconsistent(
    prop: str, model: str, layer: str, scenario: Scenario, failure: str | Sequence[Judgement], gap: str
) -> Inconsistent:
    return Inconsistent(
        _mismatch(prop, model, layer, scenario, failure), next(each for each in GAPS if each.name == gap)
    )
