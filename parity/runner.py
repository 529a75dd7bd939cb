"""Runs a property over drawn scenarios, keeps the worst that was seen, and shrinks what fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from parity.compare import Judgement, Unequal
from parity.family import Family, Layer
from parity.mismatch import Mismatch
from parity.pair import pair_of
from parity.property import Property
from parity.scenario import Scenario

PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


@dataclass
class Tally:
    """What a property has shown about a layer so far.

    Attributes:
        cases: cases judged: the rows stacked in every scenario, in every dtype.
        scenarios: scenarios drawn.
        worst: per verdict, the judgement nearest to its allowance.
        unjudged: quantities of which nothing could be said, since the reference itself was not finite.
        seconds: wall time.
    """

    scenarios: int = 0
    cases: int = 0
    worst: dict[str, Judgement] = field(default_factory=dict)
    unjudged: int = 0
    seconds: float = 0.0
    mismatch: Mismatch | None = None

    def add(self, scenario: Scenario, judgements: Sequence[Judgement]) -> None:
        """Count a scenario and keep the worst judgement per verdict."""
        self.scenarios += 1
        self.cases += scenario.stack * len(scenario.dtypes)
        for judgement in judgements:
            verdict = judgement.quantity.verdict
            if not judgement.judged:
                self.unjudged += 1
            elif verdict not in self.worst or judgement.ratio > self.worst[verdict].ratio:
                self.worst[verdict] = judgement


def check(prop: Property, family: Family, layer: Layer, scenario: Scenario, tally: Tally | None = None) -> None:
    """Judge one scenario.

    Raises:
        Mismatch: if the candidate is not the reference's function.
    """
    pair = pair_of(family.model_type, layer.name, scenario.config)
    try:
        judgements = prop.judge(pair, scenario)
    except Unequal as unequal:
        raise Mismatch(prop, family, layer, scenario, str(unequal)) from unequal
    if tally is not None:
        tally.add(scenario, judgements)
    if not all(judgement.holds for judgement in judgements):
        raise Mismatch(prop, family, layer, scenario, judgements)


def hold(
    prop: Property,
    family: Family,
    layer: Layer,
    dtypes: Sequence[str],
    *,
    examples: int | None = None,
    seed: int | None = None,
    on_scenario: Callable[[], None] = lambda: None,
) -> Tally:
    """Draw scenarios and judge each; on a failure find the smallest that fails.

    Args:
        dtypes: the dtypes wanted, of which those are used that the property is stated in.
        examples: how many scenarios; by default what the Hypothesis profile says.
        seed: the same seed draws the same scenarios; by default the profile decides.
        on_scenario: called after every scenario.

    Returns:
        What was seen, with the smallest mismatch if there is one.
    """
    tally, start, profile = Tally(), time.perf_counter(), settings()
    stated = [name for name in prop.dtypes if name in dtypes]

    @settings(
        profile,
        max_examples=examples or profile.max_examples,
        phases=PHASES,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        derandomize=seed is None and profile.derandomize,
        suppress_health_check=list(HealthCheck),
    )
    @given(prop.scenarios(family, layer, stated))
    def holds(scenario: Scenario) -> None:
        check(prop, family, layer, scenario, tally)
        on_scenario()

    try:
        (holds if seed is None else hypothesis_seed(seed)(holds))()
    except Mismatch as mismatch:
        tally.mismatch = mismatch
    tally.seconds = time.perf_counter() - start
    return tally
