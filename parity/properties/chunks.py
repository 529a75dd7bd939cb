"""Any split of a sequence into chunks, prefill or decode, gives the full forward's result and leaves its cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity import routing, strategies
from parity.compare import Judgement, Quantity, Record
from parity.family import Family, Layer
from parity.pair import Pair, forward, hold_against, run_candidate, run_truth
from parity.property import Property
from parity.scenario import DTYPES, Scenario
from parity.strategies import Pool


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Splits in at least two chunks, before positions are rescaled: beyond, the reference itself depends on them.

    Those are the gaps dynamic-chunks and longrope-chunks.
    """
    split = strategies.schedules().map(lambda chunks: chunks if len(chunks) > 1 else (*chunks, 1))
    return strategies.scenarios(family, layer, pool, schedule=split, far=False)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Hold the chunks' outputs, joined, and the last cache against the reference's one pass."""
    whole, chunked = pair.case(replace(scenario, schedule=(scenario.length,))), pair.case(scenario)
    truth = run_truth(pair, whole, forward)
    judgements = []
    for name in scenario.dtypes:
        candidate = _joined(run_candidate(pair, chunked, forward, DTYPES[name]), scenario, whole.cached)
        judgements += hold_against(pair, whole, forward, truth, candidate, name)
    return judgements


def _joined(record: Record, scenario: Scenario, cached: bool) -> Record:
    """The outputs of all steps as one, the cache after the last if wanted, and what routers chose for all tokens.

    A vector of the whole row is made of its first token, hence in the first step.
    """
    last = len(scenario.schedule) - 1
    steps: dict[Quantity, list[Tensor]] = {}
    for quantity, value in zip(record.quantities, record.values, strict=True):
        if quantity.verdict == "output" or (cached and quantity.step == last):
            steps.setdefault(replace(quantity, step=0), []).append(value)
    values = [parts[0] if parts[0].ndim == 2 else torch.cat(parts, dim=1) for parts in steps.values()]
    choices = routing.joined(record, scenario.rows, len(scenario.schedule))
    return Record(list(steps), values, [None] * len(values), choices)


PROPERTY = Property(
    "chunks",
    "gives the full forward's result for any split into chunks",
    lambda family, layer: layer.kind.attends and layer.causal,
    scenarios,
    judge,
)
