"""The gradients of the input and of every parameter are the reference's; one that is missing counts as zero."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from parity import strategies
from parity.compare import Judgement
from parity.family import Family, Kind, Layer
from parity.pair import Pair, evaluate, gradients
from parity.property import Property
from parity.scenario import Scenario
from parity.strategies import Pool

_ONE_CHUNK = st.integers(1, strategies.LONGEST).map(lambda length: (length,))


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """One pass over all tokens."""
    return strategies.scenarios(family, layer, pool, schedule=_ONE_CHUNK, stack=8)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Judge all gradients."""
    return evaluate(pair, scenario, (gradients,))


PROPERTY = Property(
    "gradients",
    "has the reference's gradients",
    lambda family, layer: layer.kind is not Kind.ROTARY and layer.trains,
    scenarios,
    judge,
)
