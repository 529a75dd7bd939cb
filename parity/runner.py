"""Runs a property over drawn scenarios, keeps the worst that was seen, and shrinks what fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import randrange
from types import MappingProxyType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import FlakyFailure

from parity import gaps
from parity.compare import Judgement, Unequal
from parity.family import Family, Layer
from parity.mismatch import Inconsistent, Mismatch
from parity.pair import pair_of
from parity.property import Property
from parity.scenario import Scenario, ScenarioError
from parity.strategies import Pool
from reimpl.config import ConfigError

CONFIGURATIONS = 8  # drawn at least, and examples of each at most
SESSION = 10  # after so many examples Hypothesis varies each five times before it draws another, so we begin anew
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "deadline": None,
        "database": None,
        "derandomize": False,
        "report_multiple_bugs": False,
        "print_blob": False,
        "suppress_health_check": list(HealthCheck),
    }
)


@dataclass
class Tally:
    """What a property has shown about a layer so far.

    Attributes:
        cases: cases judged: the rows stacked in every scenario, in every dtype.
        scenarios: scenarios drawn.
        worst: per verdict, the judgement nearest to its allowance.
        unjudged: quantities of which nothing could be said, since the reference itself was not finite.
        choices: of experts or their groups, each for one token.
        near_ties: those that rounding explains, though the truth chooses otherwise.
        seconds: wall time.
        mismatch: what failed.
        gaps: what differed in a known gap of the reference, the first in each; none of it counts above.
    """

    scenarios: int = 0
    cases: int = 0
    worst: dict[str, Judgement] = field(default_factory=dict)
    unjudged: int = 0
    choices: int = 0
    near_ties: int = 0
    seconds: float = 0.0
    mismatch: Mismatch | None = None
    gaps: dict[str, Inconsistent] = field(default_factory=dict)

    def add(self, scenario: Scenario, judgements: Sequence[Judgement]) -> None:
        """Count a scenario and keep the worst judgement per verdict."""
        self.scenarios += 1
        self.cases += scenario.stack * len(scenario.dtypes)
        for judgement in judgements:
            verdict = judgement.quantity.verdict
            self.choices += judgement.choices
            self.near_ties += judgement.near_ties
            if not judgement.judged:
                self.unjudged += 1
            elif verdict not in self.worst or judgement.ratio > self.worst[verdict].ratio:
                self.worst[verdict] = judgement


def check(prop: Property, family: Family, layer: Layer, scenario: Scenario, tally: Tally | None = None) -> None:
    """Judge one scenario. What differs in a known gap of the reference alone is noted, and no failure.

    Raises:
        Mismatch: if the candidate is not the reference's function.
    """
    tally = Tally() if tally is None else tally
    judgements, mismatch = judged(prop, family, layer, scenario)
    if mismatch is not None and (gap := _gap(mismatch)) is not None:
        tally.gaps.setdefault(gap.name, Inconsistent(mismatch, gap))
        return
    if judgements is not None:
        tally.add(scenario, judgements)
    if mismatch is not None:
        raise mismatch


def judged(
    prop: Property, family: Family, layer: Layer, scenario: Scenario
) -> tuple[list[Judgement] | None, Mismatch | None]:
    """What was judged, if the two sides could be held against each other, and the mismatch if they differ.

    In a known gap even the reference may refuse to run.
    """
    pair = pair_of(family.model_type, layer.name, scenario.config)
    try:
        judgements = prop.judge(pair, scenario)
    except Exception as error:
        unequal = isinstance(error, Unequal)
        said = str(error) if unequal else f"the reference raises {type(error).__name__}: {error}"
        mismatch = Mismatch(prop, family, layer, scenario, said)
        if not unequal and not gaps.at(mismatch.place):
            raise
        mismatch.__cause__ = error
        return None, mismatch
    holds = all(judgement.holds for judgement in judgements)
    return judgements, None if holds else Mismatch(prop, family, layer, scenario, judgements)


def _gap(mismatch: Mismatch) -> gaps.Gap | None:
    """The known gap of the reference in which a mismatch lies, if the candidate is right just outside of it.

    Raises:
        Mismatch: if it is wrong there, too.
    """
    gap = next(iter(gaps.at(mismatch.place)), None)
    if gap is not None:
        check(mismatch.prop, mismatch.family, mismatch.layer, gap.outside(mismatch.scenario))
    return gap


class Enough(Exception):
    """Nothing more needs to be drawn."""


class Found(Exception):
    """Carries a mismatch past Hypothesis, which formats every exception that it meets, and a mismatch traces itself."""

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__()
        self.mismatch = mismatch


def hold(
    prop: Property,
    family: Family,
    layer: Layer,
    dtypes: Sequence[str],
    *,
    examples: int | None = None,
    seed: int | None = None,
    stack: int | None = None,
    on_scenario: Callable[[], None] = lambda: None,
) -> Tally:
    """Draw scenarios and judge each; on a failure find the smallest that fails.

    Args:
        dtypes: the dtypes wanted, of which those are used that the property is stated in.
        examples: how many scenarios; by default what the Hypothesis profile says.
        seed: the same seed draws the same scenarios; by default the profile decides.
        stack: cases of one call; by default what the property wants.
        on_scenario: called after every scenario.

    Returns:
        What was seen, with the smallest mismatch if there is one.
    """
    tally, start = Tally(), time.perf_counter()

    def holds(scenario: Scenario) -> None:
        try:
            check(prop, family, layer, scenario, tally)
        except Mismatch as mismatch:
            raise Found(mismatch) from None
        on_scenario()

    try:
        draw(prop, family, layer, dtypes, holds, examples=examples, seed=seed, stack=stack)
    except Found as found:
        tally.mismatch = simplest(found.mismatch)
    except FlakyFailure as flaky:  # the candidate is not the same function twice
        tally.mismatch = next(each.mismatch for each in flaky.exceptions if isinstance(each, Found))
    tally.seconds = time.perf_counter() - start
    return tally


def draw(
    prop: Property,
    family: Family,
    layer: Layer,
    dtypes: Sequence[str],
    look: Callable[[Scenario], None],
    *,
    examples: int | None = None,
    seed: int | None = None,
    stack: int | None = None,
    shrink: bool = True,
) -> None:
    """Show somebody the scenarios that an ordinary run draws; the arguments are those of `hold`.

    What `look` raises ends it, after the smallest scenario that raises it was found, if that is wanted.
    """
    profile = settings()
    examples = examples or profile.max_examples
    base = _base_seed(seed, profile.derandomize)
    pool = Pool(
        dtypes=tuple(name for name in prop.stated_in(layer) if name in dtypes),
        seed=base,
        size=max(CONFIGURATIONS, examples // CONFIGURATIONS),
        stack=stack,
    )
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    for number, first in enumerate(range(0, examples, SESSION)):
        limited = settings(profile, max_examples=min(SESSION, examples - first), phases=phases, **SETTINGS)
        session = limited(given(prop.scenarios(family, layer, pool))(look))
        hypothesis_seed(f"{base} {number}")(session)()


def _base_seed(seed: int | None, derandomize: bool) -> int:
    """The run's own seed where it has one, always the same where runs must repeat, else a new one."""
    if seed is not None:
        return seed
    return 0 if derandomize else randrange(2**32)


def simplest(mismatch: Mismatch) -> Mismatch:
    """Shrink further what Hypothesis cannot, as it draws configurations whole: one axis or one case at a time."""
    for smaller in _simpler(mismatch.scenario):
        try:
            check(mismatch.prop, mismatch.family, mismatch.layer, smaller)
        except Mismatch as found:
            return simplest(found)
        except (ScenarioError, ConfigError):
            continue  # not every point of the space is a configuration
    return mismatch


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are one step simpler."""
    if scenario.stack > 1:
        yield replace(scenario, stack=1)
    for axis in scenario.config:
        yield replace(scenario, config=tuple(other for other in scenario.config if other != axis))
    if len(scenario.dtypes) > 1:
        yield from (scenario.only(name) for name in scenario.dtypes)
