"""The cause of a mismatch: the mistake that, made elsewhere, computes what the candidate computes.

It is made where a right layer is at hand: in our own, of a model type that we have, with the whole catalogue; and in
the reference itself, at the seams that its modules share by name. A mistake is the cause if every recorded call, in
every scenario and configuration, then gives the candidate's numbers, by the rule that float64 is judged by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from parity import family as families
from parity import mistakes
from parity.check import candidate, infer, replay, weights
from parity.check.adapter import Constructed
from parity.check.guest import Guest
from parity.check.ours import Ours
from parity.check.record import Call, tables_of
from parity.check.seams import Slip
from parity.check.slips import SLIPS
from parity.check.subject import chain, record, settle
from parity.check.verdict import of
from parity.compare import Record, Unequal, judge
from parity.family import Layer
from parity.mistakes import Mistake
from reimpl.weights import WeightError

if TYPE_CHECKING:
    from parity.check.session import Site

F64 = torch.float64
MOST_SECONDS = 60.0  # of looking for a cause


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the candidate computed of one call, in float64."""

    site: Site
    scenario: str
    index: int
    record: Record

    @property
    def call(self) -> Call:
        return self.site.built.calls(self.scenario)[self.index]


@dataclass(frozen=True)
class Cause:
    """What is known of the cause.

    Attributes:
        names: mistakes each of which explains the whole difference; empty if it is not known.
        tried: how many were.
    """

    names: tuple[str, ...] = ()
    tried: int = 0

    def __str__(self) -> str:
        first, *others = self.names
        same = f"; or, which is the same here: {'; '.join(others)}" if others else ""
        return f"{first}   (explains the whole difference){same}"


class Suspect(Protocol):
    """A mistake, and what is computed with it."""

    name: str

    def run(self, evidence: Evidence) -> Record: ...


def cause_of(sites: Sequence[Site], beat: Callable[[], None] = lambda: None) -> Cause:
    """The mistakes that make the candidate what it is, at sites that differ by their configurations.

    Args:
        beat: called before each mistake that is tried.
    """
    start = time.process_time()
    evidence = list(_evidence(sites))
    wrong = [each for each in evidence if not explains(Reference(), each)]
    if not wrong:
        return Cause()
    evidence = [*wrong, *(each for each in evidence if each not in wrong)]  # the telling ones first
    names: dict[str, None] = {}
    tried: dict[str, None] = {}
    for suspect in _suspects(sites, evidence):
        if time.process_time() - start > MOST_SECONDS:
            break
        beat()
        tried.setdefault(suspect.name)
        if suspect.name not in names and all(explains(suspect, each) for each in evidence):
            names.setdefault(suspect.name)
    return Cause(tuple(names), len(tried))


def _evidence(sites: Sequence[Site]) -> Iterator[Evidence]:
    """Everything that the candidate can be run on."""
    for site in sites:
        guest = site.guest("f64")
        for scenario, reason in site.scenarios.items():
            for index, call in enumerate(site.built.calls(scenario) if reason is None else ()):
                try:
                    found, _ = guest.forward(call, site.built.truth(call))
                except Unequal:
                    continue
                yield Evidence(site, scenario, index, found)


def explains(suspect: Suspect, evidence: Evidence) -> bool:
    """Whether a mistake computes what the candidate does; what is no number explains nothing."""
    try:
        made = suspect.run(evidence)
        truth = of(evidence.record, made)
        judged = judge(truth, of(truth, evidence.record), [], F64, "f64")
    except Exception:  # a mistake that this layer cannot make
        return False
    return bool(judged) and all(each.judged and each.ratio <= 1.0 for each in judged)


def _suspects(sites: Sequence[Site], evidence: Sequence[Evidence]) -> Iterator[Suspect]:
    layer = _layer(sites[0])
    if layer is not None and all(explains(Ourselves(layer), _right(each)) for each in evidence):
        model_type = sites[0].built.subject.model_type
        yield from (Ourselves(layer, mistake) for mistake in mistakes.of(model_type, layer.name))
    yield from (Mistaken(slip) for slip in SLIPS)


def _right(evidence: Evidence) -> Evidence:
    """What the candidate should have computed."""
    return replace(evidence, record=of(evidence.record, Reference().run(evidence)))


def _layer(site: Site) -> Layer | None:
    """Our own layer for the class, where the model type is one of ours."""
    subject = site.built.subject
    if subject.model_type not in families.names() or subject.directory is not None:
        return None
    name = subject.name or type(site.built.model).__name__
    layers = families.load(subject.model_type).layers
    return next((each for each in layers if each.reference == name and isinstance(each.candidate, type)), None)


class Reference:
    """The reference as it is, without any mistake."""

    name = ""

    def run(self, evidence: Evidence) -> Record:
        return evidence.site.built.truth(evidence.call)


class Ourselves:
    """Our own layer in the place of the candidate, with a mistake of the catalogue, or with none."""

    def __init__(self, layer: Layer, mistake: Mistake | None = None) -> None:
        self.layer, self.mistake = layer, mistake
        self.name = "" if mistake is None else mistake.name
        self._guests: dict[int, Guest] = {}

    def run(self, evidence: Evidence) -> Record:
        with nullcontext() if self.mistake is None else self.mistake.exchange():
            guest = self._guest(evidence.site)
            return guest.forward(evidence.call, evidence.site.built.truth(evidence.call))[0]

    def _guest(self, site: Site) -> Guest:
        """Built where the mistake is made, as some are made in building."""
        if site.number not in self._guests:
            built, adapter = site.built, Ours()
            constructed = Constructed(*built.constructor, built.config, built.layer_idx)
            module = candidate.build(adapter, self.layer.candidate, constructed).eval().double()
            fill(module, site)
            self._guests[site.number] = Guest(adapter, module, (), built.config, built.layer_idx, F64)
        return self._guests[site.number]


def fill(module: Any, site: Site) -> None:
    """Give a module of ours the weights of the reference, by equal names or by those on disk."""
    ours = weights.shapes_of(weights.wanted(module))
    for state in (site.built.state, site.built.disk):
        try:
            rules = [guess.rule for guess in infer.infer(weights.shapes_of(state), ours)]
        except WeightError:
            continue
        return weights.fill(module, state, rules)
    raise WeightError("our own layer has other weights")


@dataclass
class Now:
    """The moment of a run that goes from call to call."""

    step: int = 0
    seen: int = 0


class Mistaken:
    """The reference itself, with a mistake."""

    def __init__(self, slip: Slip) -> None:
        self.slip, self.name = slip, slip.name
        self._of_scenario: dict[tuple[int, str], list[Call]] = {}

    def run(self, evidence: Evidence) -> Record:
        site, call = evidence.site, evidence.call
        mine = self._calls(site, evidence.scenario)[evidence.index]
        module = site.built.module(F64)
        with self.slip.made(module, call) as there:
            if not there and not self.slip.tables:
                raise Unequal("there is no place for it")
            settle(module, mine, F64)
            return site.built.comparable(call, replay.forward(module, mine, F64))

    def _calls(self, site: Site, scenario: str) -> list[Call]:
        """The calls as the mistaken reference gets them: with its own tables, and its own cache where that is kept."""
        key = (site.number, scenario)
        if key not in self._of_scenario:
            calls = site.built.calls(scenario)
            if self.slip.tables:
                calls = list(map(with_tables, calls, self._recorded(site, scenario)))
            if site.guest("f64").state:
                calls = self._with_own_caches(site, calls)
            self._of_scenario[key] = calls
        return self._of_scenario[key]

    def _recorded(self, site: Site, scenario: str) -> list[Call]:
        """What the whole model, making the mistake, calls the module with."""
        model = site.built.whole_model(F64)
        recorder = site.built.recorder(model)
        with self.slip.made(model, recorder):
            return record(model, site.built.subject.task, site.built.text(scenario), recorder, F64)

    def _with_own_caches(self, site: Site, calls: Sequence[Call]) -> list[Call]:
        module, copies, now = site.built.module(F64), [replace(call) for call in calls], Now()

        def begin(call: Call) -> None:
            now.step, now.seen = call.step, call.seen

        with self.slip.made(module, now):
            chain(module, copies, begin)
        return copies


def with_tables(call: Call, other: Call) -> Call:
    """A call with the tables of another one."""
    tables = tables_of(other)
    return replace(call, tables=lambda dtype: tables)
