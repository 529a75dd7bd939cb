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
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, cycle

from torch import Tensor

from parity import repairs
from parity.compare import Record, Unequal
from parity.evidence import F64, Evidence, Fit, Making, by_ours, by_second, drawn_case, is_right, made_by_second
from parity.mistakes import Mistake, of
from parity.mistakes.seams import unplanted
from parity.pair import Measure, Pair, forward, gradients, measured, run_truth
from parity.patterns import tellings
from parity.properties.forward import precision
from parity.property import Property, find
from parity.repairs import Repair
from parity.scenario import AxisValue, Scenario, ScenarioError
from parity.strategies import Pool, examples, points
from parity.tiny import initialise
from reimpl.config import ConfigError

FRESH = 10  # scenarios drawn anew
TELLING = 3  # of all scenarios, those that must show the difference, where the configuration may vary
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
        base: the layer that made the mistakes: `ours`, or where that is itself wrong, a `second`, or `none`.
    """

    causes: tuple[Cause, ...] = ()
    tried: int = 0
    scenarios: int = 0
    base: str = "ours"

    def __str__(self) -> str:
        wrong = "" if self.base == "ours" else "our own layer is itself wrong here, "
        if not self.causes:
            return f"unknown: {wrong}{self._why}"
        first, *others = map(str, self.causes)
        same = f"; or, which is the same here: {'; '.join(others)}" if others else ""
        made = f"; {wrong}so a second implementation made the mistakes" if wrong else ""
        return f"{first}   (explains the whole difference{made}){same}"

    @property
    def _why(self) -> str:
        if self.base == "none":
            return "so there is none to make known mistakes in"
        if self.tried:
            maker = "and " * (self.base == "second")
            by = " by a second implementation" * (self.base == "second")
            return f"{maker}none of the {self.tried} mistakes and pairs of them that were tried{by} explains it"
        if self.scenarios:
            return "no known mistake could be tried"
        return "no scenario that was tried tells the candidate from our own layer, which is right"


def diagnose_precision(pair: Pair, scenario: Scenario, dtype: str) -> Diagnosis:
    """Find the mistakes that compute the same operations in too coarse a dtype as a candidate does, and no other."""
    coarse = _coarse(pair, scenario, dtype)
    known = [each for each in of(pair.family.model_type, pair.layer.name) if "precision" in each.verdicts]
    causes = []
    with unplanted():
        with by_ours(pair, ()) as ours:
            if _coarse(ours, scenario, dtype):
                return Diagnosis(base="none")
        for mistake in known:
            with by_ours(pair, (mistake,)) as ours:
                if coarse and coarse == _coarse(ours, scenario, dtype):
                    causes.append(Cause((mistake,)))
    return Diagnosis(tuple(causes), len(known), 1)


def _coarse(pair: Pair, scenario: Scenario, dtype: str) -> set[str]:
    return {each.quantity.name for each in precision(pair, scenario, dtype) if not each.holds}


def find_repair(pair: Pair, scenario: Scenario, prop: Property, within: str = "") -> Repair | None:
    """What to do to the weights of a candidate, in float64, so that it is right under a scenario and longer ones.

    Only those of modules whose names hold `within`.
    """
    scenarios = [replace(each, stack=1, dtypes=("f64",)) for each in tellings(scenario, pair.family)]
    drawn = {each: drawn_case(pair, each, prop, "f64") for each in dict.fromkeys([*scenarios[::-1], scenarios[0]])}
    truths = {each: run_truth(pair, case, forward) for each, case in drawn.items()}
    side = pair.candidate(F64)
    weights = {name: tensor.double() for name, tensor in initialise.fill(pair.plan, scenario.seed).items()}

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
    gathered: dict[Measure, list[Evidence]] = {}  # while what is planted in the candidate is

    def by(making: Making, known: Sequence[Mistake]) -> Diagnosis:
        for measure in (forward, gradients):
            if measure not in gathered:
                gathered[measure] = list(_evidence(pair, scenario, prop, dtype, pair_at, measure))
            pieces = [piece.held_against(making) for piece in gathered[measure]]
            with unplanted():
                differing = [piece for piece in pieces if piece.differs]
                if differing:
                    break
        if not differing or (pair_at is not None and len(differing) < TELLING):
            return Diagnosis(scenarios=len(differing))
        of_measure = [mistake for mistake in known if (mistake.prop == "gradients") == (measure is gradients)]
        with unplanted():
            ordered = [*differing, *(piece for piece in pieces if piece not in differing)]
            return _explain(ordered, of_measure, depth, on_try, len(differing))

    found = by(by_ours, known)
    with unplanted():
        if found.causes or is_right(by_ours, pair, scenario, prop):
            return found
        makeable = [mistake for mistake in known if mistake.name in made_by_second(pair)]
        if not makeable or not is_right(by_second, pair, scenario, prop):
            return Diagnosis(base="none")
    return replace(by(by_second, makeable), base="second")


def _explain(
    pieces: Sequence[Evidence],
    known: Sequence[Mistake],
    depth: int,
    on_try: Callable[[int, int], None],
    scenarios: int,
) -> Diagnosis:
    causes: list[Cause] = []
    total = 0
    for size in range(1, depth + 1):
        if size == 2:  # beside chance, which widens any yardstick, another mistake may pass for more than it explains
            known = [mistake for mistake in known if pieces[0].steady((mistake,))]
        together, before = list(combinations(known, size)), total
        total += len(together)
        for number, mistakes in enumerate(together, before + 1):
            if _explains(mistakes, pieces, scenarios):
                causes.append(Cause(mistakes))
            on_try(number, total)
        if causes:
            break
    return Diagnosis(tuple(sorted(causes, key=_generality)), total, scenarios)


def _explains(mistakes: Sequence[Mistake], pieces: Sequence[Evidence], differing: int) -> bool:
    """Whether mistakes explain all evidence, and closely most of that which differs, the first of it."""
    close = 0
    for number, piece in enumerate(pieces):
        fit = piece.fit(mistakes)
        if fit is Fit.NONE:
            return False
        close += fit is Fit.CLOSE and number < differing
    return 2 * close >= differing


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


def _scenarios(pair: Pair, scenario: Scenario, prop: Property, dtype: str, fixed: bool) -> Iterator[Scenario]:
    one = replace(scenario, stack=1, dtypes=(dtype,))
    longer = list(tellings(one, pair.family)) if prop.case is Pair.case and pair.layer.causal else [one]
    yield from (replace(longer[0], seed=one.seed + more) for more in range(MORE_SEEDS + 1))
    yield one
    pool = Pool(dtypes=(dtype,), size=FRESH)
    configs = cycle([scenario.config] if fixed else points(pair.family, pair.layer, pool))
    fresh = examples(prop.scenarios(pair.family, pair.layer, pool), FRESH, one.seed)
    for each, config in zip(fresh, configs, strict=False):  # each configuration once: few are drawn, and those often
        yield replace(each, stack=min(each.stack, 2), config=config)
