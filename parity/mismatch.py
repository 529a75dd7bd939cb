"""A mismatch, and how it is printed: where, how large, the smallest scenario, and the line that shows it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parity import reference
from parity.compare import Judgement, worst
from parity.family import Family, Layer
from parity.pair import pair_of
from parity.property import Property
from parity.scenario import Scenario
from parity.trace import Divergence, locate


class Mismatch(AssertionError):
    """The candidate is not the reference's function, as one scenario shows."""

    def __init__(
        self, prop: Property, family: Family, layer: Layer, scenario: Scenario, failure: str | Sequence[Judgement]
    ) -> None:
        self.prop, self.family, self.layer, self.scenario = prop, family, layer, scenario
        self.failure = failure
        super().__init__(prop.name, family.model_type, layer.name, str(scenario))

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
        """Where the two sides first part, as far as a run in float64 shows it."""
        pair = pair_of(self.family.model_type, self.layer.name, self.scenario.config)
        return locate(pair, self.scenario)

    def __str__(self) -> str:
        return "\n".join([f"{self._headline()}", *(str(line) for line in self._lines())])

    def _headline(self) -> str:
        what = " and ".join(self.verdicts) if self.verdicts else "candidate"
        verb = "differ" if len(self.verdicts) > 1 else "differs"
        return f"{self.family.model_type} / {self.layer.reference}   {what} {verb} from {reference.version()}"

    def _lines(self) -> list[_Line]:
        lines = [_Line("property", self.prop.sentence)]
        if isinstance(self.failure, str):
            lines.append(_Line("what", self.failure))
        divergence = self.divergence
        if divergence is not None:
            lines.append(_Line("where", divergence.where))
            lines += [_Line("pattern", pattern) for pattern in divergence.patterns]
        if (failed := worst(self.failed)) is not None:
            lines.append(_Line("size", _size(failed)))
            others = [str(j.quantity) for j in self.failed if j is not failed]
            if others:
                lines.append(_Line("also", _few(list(dict.fromkeys(others)))))
        lines += [_Line("smallest", repr_short(self.smallest)), _Line("again", self._again())]
        return lines

    def _again(self) -> str:
        return (
            f"parity run {self.family.model_type} --layer {self.layer.name} --property {self.prop.name} "
            f"--scenario '{self.smallest}'"
        )


@dataclass(frozen=True)
class _Line:
    label: str
    text: str

    def __str__(self) -> str:
        return f"  {self.label:<9} {self.text}"


def _size(judgement: Judgement) -> str:
    return (
        f"{judgement.quantity}: {judgement.error:.2g} relative in {judgement.dtype}, allowed {judgement.allowed:.2g}"
        f" ({judgement.ratio:.2g} times)"
    )


def _few(names: Sequence[str], shown: int = 4) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def repr_short(scenario: Scenario) -> str:
    """The scenario as a call, with the fields that are not at their default."""
    default = Scenario()
    fields = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
    shown = [f"{name}={value!r}" for name, value in fields.items() if value != getattr(default, name)]
    return f"Scenario({', '.join(shown)})"
