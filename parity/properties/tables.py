"""Rotary tables agree from position 0 to 131,072, and do not remember a long prompt when a short one follows."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from parity import strategies
from parity.case import Case
from parity.compare import Judgement
from parity.family import Family, Kind, Layer
from parity.pair import Pair, evaluate, forward
from parity.property import Property
from parity.scenario import Scenario
from parity.strategies import Pool

FURTHEST = 131_072


@st.composite
def _short_long_short(draw: st.DrawFn, family: Family, layer: Layer, pool: Pool) -> Scenario:
    length = draw(st.integers(1, 6))
    offset = draw(st.sampled_from((0, 10, 30, 100, 4000, FURTHEST - 6)))
    config = draw(strategies.configs(family, layer, pool))
    return Scenario(config=config, schedule=(length,) * 3, offset=offset, dtypes=pool.dtypes)


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Three calls: the first positions, positions far out, the first again."""
    return _short_long_short(family, layer, pool)


def case(pair: Pair, scenario: Scenario) -> Case:
    """Three calls of one length: at the first positions, at the scenario's offset, at the first again."""
    near = torch.arange(scenario.schedule[0])
    positions = torch.cat([near, near + scenario.offset, near]).expand(scenario.rows, -1)
    return pair.case(scenario).varied(positions=positions)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Judge the tables of all three calls on one module."""
    return evaluate(pair, scenario, (forward,), case(pair, scenario))


PROPERTY = Property(
    "tables",
    "gives the reference's rotary tables near, far, and near again",
    lambda family, layer: layer.kind is Kind.ROTARY,
    scenarios,
    judge,
    case=case,
)
