"""One check from beginning to end: find both sides, build them, carry the weights over, judge every scenario."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from parity.check import candidate, drawn, drive, guard, infer, replay, tree, weights
from parity.check.adapter import Adapter, Constructed
from parity.check.explain import explained
from parity.check.guest import Guest, Hangs
from parity.check.record import Call
from parity.check.resolve import resolve
from parity.check.result import Result, Row, Where, plain_row, versions
from parity.check.rules import as_toml, describe
from parity.check.sandbox import Limits, Send
from parity.check.subject import Built, Subject, SubjectError
from parity.check.verdict import is_first, judge_operations, judged
from parity.compare import Unequal
from parity.scenario import DTYPES, ScenarioError
from reimpl.weights import Rule, WeightError

PROPERTIES = ("forward", "gradients")
DRAWS = 3  # scenarios, for every configuration, beside the named ones


@dataclass(frozen=True)
class Options:
    """What a check is asked to do. `candidate`, `adapter` and `weights` are places, or what stands there itself."""

    candidate: Any
    against: str
    adapter: Any = None
    weights: Any = None
    properties: Sequence[str] = PROPERTIES
    dtypes: Sequence[str] = tuple(DTYPES)
    configurations: int = 4
    draws: int = DRAWS
    seed: int = 0
    point: int | None = None
    scenario: str | None = None
    layer_idx: int | None = None
    shared: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    swap: bool = False
    mistakes: bool = False

    @property
    def name(self) -> str:
        """The candidate as it is called in reports."""
        return self.candidate if isinstance(self.candidate, str) else getattr(self.candidate, "__name__", "candidate")


class Session:
    """A check while it lasts.

    Raises:
        CandidateError, SubjectError, WeightError: if either side cannot be found or built, or weights do not fit.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.subject: Subject = resolve(options.against)
        given, adapter = options.candidate, options.adapter
        self.target = candidate.load(given) if isinstance(given, str) else given
        adapter = candidate.load(adapter, "adapter") if isinstance(adapter, str) else adapter
        self.adapter: Adapter = candidate.adapter_of(self.target, adapter)
        self.tables = self._rules(options.weights)
        if options.scenario is not None and options.scenario not in drive.TEXTS:
            check_line(options.scenario)
        self.notes: dict[str, None] = {}

    def _rules(self, given: Any) -> Any:
        if isinstance(given, str):
            return weights.load_rules(given, lambda place: candidate.load(place, "rules"))
        return given if given is not None else self.adapter.rules or None

    @cached_property
    def sites(self) -> list[Site]:
        """The reference at every point asked for, the plain one first, with the candidate built beside it."""
        points = self.subject.points(self.options.configurations, self.options.seed)
        numbers = range(len(points)) if self.options.point is None else [self.options.point]
        if self.options.point is not None and self.options.point >= len(points):
            raise SubjectError(f"{self.subject}: there is no point {self.options.point}; the last is {len(points) - 1}")
        found = []
        for number in numbers:
            try:
                found.append(Site(self, number, self.subject.build(points[number], self.options.seed)))
            except (candidate.CandidateError, WeightError) as error:
                if number == 0:
                    raise
                raise type(error)(f"under the configuration with {points[number]}: {error}") from error
        return found


class Site:
    """Both sides at one point of the configuration space."""

    def __init__(self, session: Session, number: int, built: Built) -> None:
        self.session, self.number, self.built = session, number, built
        if session.options.layer_idx is not None:
            built.path = at_layer(built, session.options.layer_idx)
        self._guests: dict[torch.dtype, Guest] = {}
        self.calls = guard.Calls()
        constructed = Constructed(*built.constructor, built.config, built.layer_idx)
        self.module = candidate.build(session.adapter, session.target, constructed).eval()
        self.state = built.state
        self.on_disk = False
        self.guesses: list[infer.Guess] = []
        self.rules = self._rules()
        weights.fill(self.module, self.state, self.rules)

    def rebuilt(self, change: Callable[[Any], None]) -> nn.Module:
        """The candidate in float64, built from a configuration that was changed; its weights are the same."""
        args, kwargs = self.built.constructor
        config = self.built.config
        for each in (config, *args, *kwargs.values()):
            if hasattr(each, "to_diff_dict"):
                change(each)
        constructed = Constructed(args, kwargs, config, self.built.layer_idx)
        module = candidate.build(self.session.adapter, self.session.target, constructed).eval().double()
        weights.fill(module, self.state, self.rules)
        return module

    def _rules(self) -> list[Rule]:
        """Those given; what they leave by equal names, else by inference. Names are those in memory, else on disk.

        Raises:
            CandidateError: if a function of the user's raises.
            WeightError: if some tensor is left, on either side.
        """
        reasons: list[WeightError] = []
        for on_disk in (False, True):
            try:
                self.state = self.built.disk if on_disk else self.built.state
                rules = self._given_rules()
                self.guesses = self._rest(rules)
            except WeightError as error:
                reasons.append(error)
            else:
                self.on_disk = on_disk
                return [*rules, *(guess.rule for guess in self.guesses)]
        raise reasons[0]

    def _given_rules(self) -> list[Rule]:
        room = weights.shapes_of(weights.slots(self.module))
        given = partial(weights.explicit, self.session.tables, self.state, room, self.built.config)
        return candidate.with_message(given, "rules cannot be made", WeightError)

    def _rest(self, rules: Sequence[Rule]) -> list[infer.Guess]:
        """What the rules given leave, told from names and shapes."""
        left: dict[str, Tensor] = dict(self.state)
        made: dict[str, Tensor] = {}
        for rule in rules:
            made |= rule.to_module(left)
        room = weights.wanted(self.module)
        room |= {name: buffer for name, buffer in self.module.named_buffers() if name in left}
        return infer.infer(weights.shapes_of(left), weights.shapes_of({n: t for n, t in room.items() if n not in made}))

    def guest(self, name: str) -> Guest:
        """The candidate in a dtype: parameters in that of the reference's of the same name.

        Buffers stay as they are, but in float64, where a table that is written in float32 would lose what it is for.
        """
        dtype = DTYPES[name]
        if dtype not in self._guests:
            module = self._again()
            if name == "f64":
                module.double()
            kept = {key: value.dtype for key, value in self.built.module(dtype).named_parameters()}
            for key, parameter in module.named_parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(kept.get(key, dtype))
            weights.fill(module, self.state, self.rules)
            options = self.session.options
            self._guests[dtype] = Guest(
                self.session.adapter,
                module,
                self.rules,
                self.built.config,
                self.built.layer_idx,
                dtype,
                options.limits.seconds,
                notes=self.session.notes,
                calls=self.calls,
                on_disk=self.on_disk,
            )
        return self._guests[dtype]

    def _again(self) -> nn.Module:
        """The candidate's module once more: a copy, or built anew where it cannot be copied."""
        try:
            return copy.deepcopy(self.module)
        except Exception:
            constructed = Constructed(*self.built.constructor, self.built.config, self.built.layer_idx)
            return candidate.build(self.session.adapter, self.session.target, constructed).eval()

    @cached_property
    def scenarios(self) -> dict[str, str | None]:
        """The named ones, then some that are drawn; with the reasons of those which the reference refuses."""
        options = self.session.options
        if options.scenario is not None:
            return {options.scenario: self.built.refusal(options.scenario)}
        named = {name: self.built.refusal(name) for name in drive.TEXTS}
        lines = drawn.drawn(self.session.subject.task, 3 * options.draws, options.seed + self.number)
        driven = (line for line in lines if self.built.refusal(line) is None)
        return named | dict.fromkeys(islice(driven, options.draws))


def check_line(scenario: str) -> None:
    """That a scenario is one that is known by its name, or a line.

    Raises:
        SubjectError: saying what is wrong with it.
    """
    try:
        drawn.text(scenario)
    except ScenarioError as error:
        raise SubjectError(
            f"no scenario {scenario!r}; there are {', '.join(drive.TEXTS)}, and lines: {error}"
        ) from error


def at_layer(built: Built, index: int) -> str:
    """The path of the same class in another layer of the model."""
    path = re.sub(r"(?<=\.)\d+(?=\.|$)", str(index), built.path, count=1)
    there = [name for name, part in built.model.named_modules() if type(part).__name__ == built.subject.name]
    if path not in there:
        raise SubjectError(f"{built.subject}: layer {index} of the tiny model has none; it is at {', '.join(there)}")
    return path


def check(options: Options, send: Send = lambda kind, value: None) -> Result:
    """Hold a candidate against its reference.

    Args:
        send: told "at", what is being done, and "of", how many steps there are.

    Raises:
        CandidateError, SubjectError, WeightError: see `Session`.
    """
    torch.set_num_threads(1)
    send("at", "building both sides")
    session = Session(options)
    sites = session.sites
    rows = [Row(prop, name) for prop in options.properties for name in options.dtypes]
    send("of", sum(len(site.scenarios) for site in sites))
    try:
        for site in sites:
            for scenario, reason in site.scenarios.items():
                send("at", f"{scenario} under configuration {site.number} ({site.built.point})")
                if reason is None:
                    _run_scenario(site, scenario, rows)
                else:
                    session.notes[f"{scenario} is left out: {reason}"] = None
    except Hangs:
        session.notes["nothing else was run, as the candidate hangs"] = None
    refused = _refused(session, sites, rows)
    if options.swap:
        from parity.check.swap import swapped_rows

        send("at", "the candidate in a live model")
        rows += swapped_rows(session, sites[0])
    send("at", "looking for where the two sides part")
    return Result(
        candidate=options.name,
        reference=str(session.subject),
        versions=versions(options.candidate),
        configurations=[str(site.built.point) for site in sites],
        weights=[describe(rule) for rule in sites[0].rules],
        unsure=[describe(guess.rule) for guess in sites[0].guesses if not guess.sure],
        notes=[*session.notes, *_left_out(session.adapter)],
        rows=[plain_row(row) for row in rows],
        mismatches=explained(sites, rows, lambda: send("alive", None)),
        refused=refused,
        rules=as_toml(sites[0].rules),
        mistakes=_mistakes(session, sites[0], send),
    )


def _mistakes(session: Session, site: Site, send: Send) -> list[dict[str, Any]]:
    """What comes out of every mistake made in the layer from outside, where that was asked for."""
    if not session.options.mistakes:
        return []
    from parity.check.inject import injected

    found = []
    for mistake in injected(session, site):
        send("at", f"mistake: {mistake.name}")
        found.append({"name": mistake.name, "kind": mistake.kind, "caught": bool(mistake.by), "by": list(mistake.by)})
    return found


def _left_out(adapter: Adapter) -> list[str]:
    names = sorted(getattr(adapter, "left_out", ()))
    return [f"its forward does not take {', '.join(names)}, which the reference was given"] if names else []


def _run_scenario(site: Site, scenario: str, rows: Sequence[Row]) -> None:
    calls = site.built.calls(scenario)
    if not calls:
        site.session.notes[f"{scenario} is left out: the reference's module is not called in it"] = None
    for row in rows:
        start = time.perf_counter()
        for index, call in enumerate(calls):
            where = Where(site.number, str(site.built.point), scenario, index)
            if row.prop == "gradients" and not (site.built.text(scenario).one_pass and is_first(call)):
                continue
            _judge(site, row, call, where)
        row.seconds += time.perf_counter() - start


def _judge(site: Site, row: Row, call: Call, where: Where) -> None:
    try:
        judgements = judged(site.built, site.guest(row.dtype), call, row.prop, row.dtype)
        if row.prop == "forward" and row.dtype != "f64" and (site.number, row.dtype) not in row.audited:
            row.audited.add((site.number, row.dtype))
            judgements += judge_operations(site.built, site.guest(row.dtype), call, row.dtype)
    except Unequal as error:
        row.add(where, str(error))
        if isinstance(error, Hangs):
            raise
    else:
        row.add(where, judgements)


def _refused(session: Session, sites: Sequence[Site], rows: Sequence[Row]) -> str | None:
    """Why what holds proves nothing, if so."""
    called = dict.fromkeys(name for site in sites for name in site.calls.names)
    if called:
        if reason := guard.refused_calls(called, session.options.shared):
            return reason
        session.notes[f"shares {', '.join(called)} with the reference, as declared: taken as right"] = None
    if any(row.failures for row in rows):
        return None
    return next(filter(None, map(_proves_nothing, sites[:1])), None)


def _proves_nothing(site: Site) -> str | None:
    """What the first call of a site shows: results that are arguments, and weights that are never read."""
    name = site.session.options.dtypes[0]
    guest, scenario = site.guest(name), next((s for s, reason in site.scenarios.items() if reason is None), None)
    if scenario is None or not (calls := site.built.calls(scenario)):
        return "no scenario was run, so that nothing is proven"
    call = calls[0]
    truth = site.built.truth(call)
    arguments = tree.tensors(call.given).values()
    if guard.returns_input([value for value in truth.values if value.numel() > 1], [a.double() for a in arguments]):
        return "the reference itself returns its input here, so that nothing is proven"

    unread = [name for name in list(guest.parameters)[: guard.MOST_READ] if not _reads(site, guest, name)]
    needed = [name for name in unread if _reference_reads(site, guest, name)]
    return f"it never reads its {', '.join(needed[:3])}, on which the reference depends" if needed else None


def _first_calls(site: Site) -> list[Call]:
    """The calls of a site that begin a scenario."""
    calls = [call for name, reason in site.scenarios.items() if reason is None for call in site.built.calls(name)]
    return [call for call in calls if call.step == 0]


def _reads(site: Site, guest: Guest, name: str) -> bool:
    """Whether anything becomes another number when a parameter of the candidate holds none."""
    return any(
        not guard.unread(guest.module, partial(_results, site, guest, call), [name]) for call in _first_calls(site)
    )


def _results(site: Site, guest: Guest, call: Call) -> list[Tensor]:
    replayed = guest.replay(call, site.built.truth(call))
    return [*replayed.output.values(), *replayed.cache.values()]


def _reference_reads(site: Site, guest: Guest, name: str) -> bool:
    """Whether the reference depends on that part of its weights which becomes a parameter of the candidate."""
    marks = {other: torch.zeros_like(value) for other, value in guest.parameters.items()}
    marks[name] = torch.full_like(marks[name], torch.nan)
    theirs = site.built.module(guest.dtype)
    before = [_values(theirs, call, guest.dtype) for call in _first_calls(site)]
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for other, mark in weights.back(marks, site.rules).items():
            if other in parameters:
                parameters[other].copy_(torch.where(mark.isnan(), mark, parameters[other]))
    after = [_values(theirs, call, guest.dtype) for call in _first_calls(site)]
    return not all(replay.same(*pair) for pairs in zip(before, after, strict=True) for pair in zip(*pairs, strict=True))


def _values(module: nn.Module, call: Call, dtype: torch.dtype) -> list[Tensor]:
    return list(replay.forward(module, call, dtype).values)
