"""A layer computes what its reference computes, whatever the split into chunks, the padding and the positions.

Outputs and the cache after every step; in float64 against the truth, below it within the reference's own error.
Delicate operations run no coarser than the reference's, and nothing that the layer was called with is changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from hypothesis.strategies import SearchStrategy

from parity import strategies
from parity.audit import audit, judge_precision
from parity.compare import Judgement
from parity.family import Family, Layer
from parity.pair import Pair, evaluate, forward, run_candidate, run_references
from parity.property import Property
from parity.scenario import DTYPES, Scenario
from parity.strategies import Pool


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Any scenario: chunks, padding, packed documents, positions far out."""
    return strategies.scenarios(family, layer, pool, packed=True)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Judge outputs, caches, side effects, and once per configuration the precision of delicate operations."""
    judgements = evaluate(pair, scenario, (forward,))
    coarsest = max(scenario.dtypes, key=lambda name: torch.finfo(DTYPES[name]).eps)
    return judgements + pair.once(("precision", coarsest), partial(precision, pair, scenario, coarsest))


def precision(pair: Pair, scenario: Scenario, name: str) -> list[Judgement]:
    """Judge how coarse the delicate operations of one case are, in a dtype in which there is something to lose."""
    dtype = DTYPES[name]
    if dtype is torch.float64:
        return []
    case = pair.case(replace(scenario, stack=1))
    reference = audit(lambda: run_references(pair, case, forward, dtype))
    candidate = audit(lambda: run_candidate(pair, case, forward, dtype))
    return judge_precision(candidate, reference, name)


PROPERTY = Property("forward", "computes what the reference computes", lambda family, layer: True, scenarios, judge)
