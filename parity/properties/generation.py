"""Greedy generation gives the reference's tokens, with and without a cache, for one row and for a padded batch."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity import strategies
from parity.case import Case
from parity.compare import Judgement, Quantity
from parity.family import Family, Kind, Layer
from parity.oracle import lifted
from parity.pair import Pair
from parity.property import Property
from parity.scenario import Scenario
from parity.strategies import Pool

NEW_TOKENS = 5


@st.composite
def _prompts(draw: st.DrawFn, family: Family, layer: Layer, pool: Pool) -> Scenario:
    length, batch = draw(st.integers(1, 8)), 1 if layer.fewest > 1 else draw(st.integers(1, 3))  # gap rwkv-rows
    most = length - 1 if layer.masks else 0
    padding = tuple(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)))
    config = draw(strategies.configs(family, layer, pool))
    return Scenario(
        config=config,
        batch=batch,
        schedule=(length,),
        padding=padding,
        seed=draw(strategies.SEEDS),
        dtypes=pool.dtypes,
        **draw(strategies.memories(family, layer, config, batch)),
    )


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Prompts of one or several rows, padded on the left."""
    return _prompts(family, layer, pool)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Count the tokens that differ; the allowance is none. The token to stop at is one that the reference generated."""
    case = pair.case(scenario)
    theirs = _reference_tokens(pair, case, use_cache=True, eos=None)
    judgements = []
    for name, use_cache, eos in (
        ("cached", True, None),
        ("uncached", False, None),
        ("until a token", True, int(theirs[0, scenario.length + 1])),
    ):
        theirs = _reference_tokens(pair, case, use_cache, eos)
        wrong = _differing(_candidate_tokens(pair, case, use_cache, eos), theirs)
        judgements.append(Judgement(Quantity(f"tokens, {name}", "output"), "f64", wrong, wrong, 0.0, 0.0))
    return judgements


def _reference_tokens(pair: Pair, case: Case, use_cache: bool, eos: int | None) -> Tensor:
    side = pair.reference(torch.float64)
    side.use(pair.family.implementations[0])
    pair.ready(side, case.scenario.seed)
    with torch.no_grad(), lifted():
        return side.generate(case, NEW_TOKENS, use_cache, eos)


def _candidate_tokens(pair: Pair, case: Case, use_cache: bool, eos: int | None) -> Tensor:
    side = pair.candidate(torch.float64)
    pair.ready(side, case.scenario.seed)
    with torch.no_grad():
        return side.generate(case, NEW_TOKENS, use_cache, eos)


def _differing(ours: Tensor, theirs: Tensor) -> float:
    """How many tokens differ, a missing one included."""
    common = min(ours.shape[1], theirs.shape[1])
    longer = abs(ours.shape[1] - theirs.shape[1])
    return float((ours[:, :common] != theirs[:, :common]).sum() + longer)


PROPERTY = Property(
    "generation",
    "generates the reference's tokens",
    lambda family, layer: layer.kind is Kind.MODEL and layer.generates,
    scenarios,
    judge,
    dtypes=("f64",),
)
