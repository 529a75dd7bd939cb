"""Why a candidate differs: known mistakes, made by our own layer, that compute what the candidate computes.

A mistake is the cause if our layer, making it, gives the candidate's numbers: all outputs, the whole cache after every
step, what is written to that should not be; or its gradients, where everything else is right. In float64 to the bound
that decides there; of a candidate that exists in a lower precision only, within the error that our own layer makes in
that precision, with the same mistake. It must explain the whole difference, and not only in the scenario that failed:
longer ones and fresh ones are asked, too, in other configurations where the candidate can have any. What no mistake
explains, pairs of them may. What they do not explain is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations

import torch
from torch import Tensor

from parity import family as families
from parity import repairs, routing
from parity.case import Case
from parity.compare import Judgement, Record, Unequal
from parity.mistakes import Mistake, of
from parity.mistakes.seams import unplanted
from parity.pair import (
    Measure,
    Pair,
    form_arguments,
    forward,
    gradients,
    judge_records,
    measured,
    run_disturbed,
    run_truth,
    versions,
)
from parity.patterns import tellings
from parity.properties.forward import precision
from parity.property import Property, find
from parity.repairs import Repair
from parity.scenario import DTYPES, AxisValue, Scenario, ScenarioError
from parity.strategies import Pool, examples
from parity.tiny import initialise
from reimpl.attention import IMPLEMENTATIONS
from reimpl.config import ConfigError

F64 = torch.float64
FRESH = 10  # scenarios drawn anew
TELLING = 3  # of all scenarios, those that must show the difference, where the configuration may vary
NEAR = 32  # times the allowance, beyond which a second look at the yardstick is not worth its time
DISTURBANCES = 4  # for that look
MORE_SEEDS = 2  # of the scenario that failed
PairAt = Callable[[tuple[tuple[str, AxisValue], ...]], Pair]


@dataclass(frozen=True)
class Cause:
    """Mistakes that, made together, compute what the candidate computes."""

    mistakes: tuple[Mistake, ...]

    def __str__(self) -> str:
        return ", and ".join(mistake.name for mistake in self.mistakes)

    @property
    def remedies(self) -> tuple[str, ...]:
        """Lines of code that mend the weights, where that mends the candidate."""
        remedies = tuple(mistake.remedy for mistake in self.mistakes)
        return remedies if all(remedies) else ()


@dataclass(frozen=True)
class Diagnosis:
    """What is known of the cause.

    Attributes:
        causes: each explains the whole difference, as well as the others do; the most special first. None: unknown.
        tried: how many mistakes and pairs of them were held against the candidate.
        scenarios: under how many scenarios the candidate was seen to differ.
    """

    causes: tuple[Cause, ...] = ()
    tried: int = 0
    scenarios: int = 0

    def __str__(self) -> str:
        if not self.causes:
            if self.tried:
                return f"unknown: none of the {self.tried} mistakes and pairs of them that were tried explains it"
            if self.scenarios:
                return "unknown: no known mistake could be tried"
            return "unknown: our own layer computes the same, so there is none to make known mistakes in"
        first, *others = map(str, self.causes)
        same = f"; or, which is the same here: {'; '.join(others)}" if others else ""
        return f"{first}   (explains the whole difference){same}"


class Evidence:
    """What the candidate computed under one scenario, to be held against what our layer computes with mistakes.

    Raises:
        Unequal: if the candidate raises something itself.
    """

    def __init__(self, pair: Pair, draw: Callable[[], Case], measure: Measure, dtype: str) -> None:
        self.pair, self._draw, self.measure, self.name, self.dtype = pair, draw, measure, dtype, DTYPES[dtype]
        self.record, self.writes = self._run(pair, self.dtype)

    def _run(self, pair: Pair, dtype: torch.dtype, told: routing.Told | None = None) -> tuple[Record, list[str]]:
        """What a pair's candidate computes, and what it writes to; a case of its own, as that may be spoilt."""
        case = self._case
        before = versions(case)
        record = measured(pair, pair.candidate(dtype), case, self.measure, told or {})
        after = versions(case)
        writes = [name.partition(" in ")[0] for name, count in before.items() if after[name] != count]
        if writes:
            del self._case
        return record, writes

    @cached_property
    def _case(self) -> Case:
        return self._draw()

    def explained_by(self, mistakes: Sequence[Mistake]) -> bool:
        """Whether our layer, making these mistakes, computes the same, by a measure that tells it from a right one."""
        try:
            with ExitStack() as stack:
                for mistake in mistakes:
                    stack.enter_context(mistake.exchange())
                return self._explained(powerful=bool(mistakes) and self.dtype is not F64 and self.differs)
        except Unequal:
            return False

    @cached_property
    def differs(self) -> bool:
        """Whether our layer, as it should be, computes something else; to be asked for before any mistake is made."""
        self._right = self._run(self._ours(), F64)
        return not self.explained_by(())

    def _ours(self) -> Pair:
        return _ours_beside(self.pair)

    def _explained(self, powerful: bool) -> bool:
        ours = self._ours()
        mistaken, writes = self._run(ours, F64)
        if writes != self.writes:
            return False
        if self.dtype is F64:
            return _holds(judge_records(ours, self._case, mistaken, self.record, [], "f64"))
        told = routing.agreed(self.record, mistaken)
        if not routing.obeyed(mistaken, told):
            mistaken, _ = self._run(ours, F64, told)
        yards: list[Record] = []
        for more in self._yardsticks(ours, told):
            yards += more()
            judgements = judge_records(ours, self._case, mistaken, self.record, yards, self.name)
            if any(judgement.ratio > NEAR for judgement in judgements):
                return False
            if _holds(judgements):
                return not powerful or self._tells(ours, mistaken, yards)
        return False

    def _tells(self, ours: Pair, mistaken: Record, yards: Sequence[Record]) -> bool:
        """Whether what is allowed would not make our layer pass without the mistake, as where each run is another."""
        right, writes = self._right
        as_candidate = replace(right, values=[value.to(self.dtype) for value in right.values])
        try:
            judged = judge_records(ours, self._case, mistaken, as_candidate, yards, self.name)
        except Unequal:
            return True
        return writes != self.writes or not _holds(judged)

    def _yardsticks(self, ours: Pair, told: routing.Told) -> Iterator[Callable[[], list[Record]]]:
        """What our layer computes in the candidate's dtype: as it is, in its other ways, with its inputs disturbed."""
        for way in self._ways(ours):
            yield partial(self._run_once, way, told)
        side = ours.candidate(self.dtype)
        yield partial(run_disturbed, ours, side, self._case, self.measure, told, DISTURBANCES)

    def _run_once(self, pair: Pair, told: routing.Told) -> list[Record]:
        return [self._run(pair, self.dtype, told)[0]]

    @staticmethod
    def _ways(ours: Pair) -> Iterator[Pair]:
        """Our layer with each of its implementations, as far as it has any."""
        if "attend" not in ours.layer.axes:
            yield ours
            return
        for way in IMPLEMENTATIONS:
            other = ours.beside()
            other.point = {**ours.point, "attend": way}
            yield other


def diagnose_precision(pair: Pair, scenario: Scenario, dtype: str) -> Diagnosis:
    """Find the mistakes that compute the same operations in too coarse a dtype as a candidate does, and no other."""
    coarse = _coarse(pair, scenario, dtype)
    known = [each for each in of(pair.family.model_type, pair.layer.name) if "precision" in each.verdicts]
    causes = []
    with unplanted():
        for mistake in known:
            with mistake.exchange():
                if coarse and coarse == _coarse(_ours_beside(pair), scenario, dtype):
                    causes.append(Cause((mistake,)))
    return Diagnosis(tuple(causes), len(known), 1)


def _coarse(pair: Pair, scenario: Scenario, dtype: str) -> set[str]:
    return {each.quantity.name for each in precision(pair, scenario, dtype) if not each.holds}


def _ours_beside(pair: Pair) -> Pair:
    """Our own layer, built anew, on the references of a pair."""
    return pair.beside(families.load(pair.family.model_type).layer(pair.layer.name))


def find_repair(pair: Pair, scenario: Scenario, prop: Property, within: str = "") -> Repair | None:
    """What to do to the weights of a candidate, in float64, so that it is right under a scenario and longer ones.

    Only those of modules whose names hold `within`.
    """
    scenarios = [replace(each, stack=1, dtypes=("f64",)) for each in tellings(scenario, pair.family)]
    drawn = {each: drawn_case(pair, each, prop, "f64") for each in dict.fromkeys([*scenarios[::-1], scenarios[0]])}
    truths = {each: run_truth(pair, case, forward) for each, case in drawn.items()}
    side, weights = pair.candidate(F64), initialise.fill(pair.plan, scenario.seed)

    def run(each: Scenario, given: Mapping[str, Tensor]) -> Record:
        pair.load(side, given, scenario.seed)
        return measured(pair, side, drawn[each], forward)

    def holds(each: Scenario, repair: Repair) -> bool:
        wrong = repairs.wrong_verdicts(partial(run, each), repair.applied(weights), truths[each])
        return wrong is not None and wrong <= {"cache"}

    first, *others = drawn
    if repairs.wrong_verdicts(partial(run, first), weights, truths[first]) in (None, set()):
        return None  # it breaks off, or its numbers are right
    try:
        return repairs.find(
            weights,
            partial(run, first),
            truths[first],
            within=within,
            confirm=lambda repair: all(holds(e, repair) for e in others),
        )
    finally:
        pair.forget()


def _holds(judgements: Sequence[Judgement]) -> bool:
    return all(judgement.holds for judgement in judgements)


def diagnose(
    pair: Pair,
    scenario: Scenario,
    prop: Property | None = None,
    *,
    dtype: str = "f64",
    known: Sequence[Mistake] | None = None,
    pair_at: PairAt | None = None,
    depth: int = 2,
    on_try: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Find the mistakes that make a candidate what it is.

    Args:
        pair: the candidate beside its reference, in a family of which we have a layer of our own.
        scenario: one that fails.
        prop: the property that fails; by default that outputs and caches are right.
        dtype: in which the candidate exists.
        known: the mistakes to try; by default all that the catalogue has for this layer.
        pair_at: the same candidate under another configuration, where it can have any.
        depth: 1 for single mistakes only, 2 for pairs, too, where no single one explains it.
        on_try: called with the number of mistakes and pairs tried, and how many there are to try.
    """
    prop = prop or find("forward")
    known = of(pair.family.model_type, pair.layer.name) if known is None else known
    for measure in (forward, gradients):
        evidence = list(_evidence(pair, scenario, prop, dtype, pair_at, measure))
        with unplanted():
            differing = [piece for piece in evidence if piece.differs]
            if differing:
                break
    if not differing or (pair_at is not None and len(differing) < TELLING):
        return Diagnosis(scenarios=len(differing))
    of_measure = [mistake for mistake in known if (mistake.prop == "gradients") == (measure is gradients)]
    pieces = [*differing, *(piece for piece in evidence if piece not in differing)]
    with unplanted():
        return _explain(pieces, of_measure, depth, on_try, len(differing))


def _explain(
    pieces: Sequence[Evidence],
    known: Sequence[Mistake],
    depth: int,
    on_try: Callable[[int, int], None],
    scenarios: int,
) -> Diagnosis:
    singles = [(mistake,) for mistake in known]
    causes, total = [], len(singles)
    for number, single in enumerate(singles, 1):
        if all(piece.explained_by(single) for piece in pieces):
            causes.append(Cause(single))
        on_try(number, total)
    if not causes and depth > 1:
        couples = list(combinations(known, 2))
        total += len(couples)
        for number, couple in enumerate(couples, len(known) + 1):
            if all(piece.explained_by(couple) for piece in pieces):
                causes.append(Cause(couple))
            on_try(number, total)
    return Diagnosis(tuple(sorted(causes, key=_generality)), total, scenarios)


def _generality(cause: Cause) -> int:
    """In how many layers of how many families it can be made."""
    return sum(len(layers) for mistake in cause.mistakes for layers in mistake.where.values())


def _evidence(
    pair: Pair, scenario: Scenario, prop: Property, dtype: str, pair_at: PairAt | None, measure: Measure
) -> Iterator[Evidence]:
    """What the candidate computes under the scenario that fails, made longer, and under others."""
    if measure is gradients:
        scenario = replace(scenario, schedule=(scenario.length,))
    for each in _scenarios(pair, scenario, prop, dtype, fixed=pair_at is None):
        try:
            other = pair if each.config == scenario.config or pair_at is None else pair_at(each.config)
            yield Evidence(other, partial(drawn_case, other, each, prop, dtype), measure, dtype)
        except (Unequal, ScenarioError, ConfigError):
            continue


def drawn_case(pair: Pair, scenario: Scenario, prop: Property, dtype: str) -> Case:
    """The case of a scenario, with all that layers are called with in float64 and in the candidate's dtype."""
    case = prop.case(pair, scenario)
    for each in {F64, DTYPES[dtype]}:
        form_arguments(pair, case, each)
    return case


def _scenarios(pair: Pair, scenario: Scenario, prop: Property, dtype: str, fixed: bool) -> Iterator[Scenario]:
    one = replace(scenario, stack=1, dtypes=(dtype,))
    longer = list(tellings(one, pair.family)) if prop.case is Pair.case and pair.layer.causal else [one]
    yield from (replace(longer[0], seed=one.seed + more) for more in range(MORE_SEEDS + 1))
    yield one
    source = prop.scenarios(pair.family, pair.layer, Pool(dtypes=(dtype,), seed=one.seed, size=FRESH))
    for each in examples(source, FRESH, one.seed):
        each = replace(each, stack=min(each.stack, 2))
        yield replace(each, config=scenario.config) if fixed else each
