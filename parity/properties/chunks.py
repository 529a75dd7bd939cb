"""Any split of a sequence into chunks, prefill or decode, gives the full forward's result and leaves its cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis.strategies import SearchStrategy

from parity import strategies
from parity.compare import Judgement, Quantity, Record
from parity.family import Family, Layer
from parity.pair import Pair, forward, hold_against, run_candidate, run_truth
from parity.property import Property
from parity.scenario import DTYPES, Scenario
from parity.strategies import Pool


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Splits in at least two chunks, before positions are rescaled: beyond, the reference itself depends on them."""
    split = strategies.schedules().map(lambda chunks: chunks if len(chunks) > 1 else (*chunks, 1))
    return strategies.scenarios(family, layer, pool, schedule=split, far=False)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Hold the chunks' outputs, joined, and the last cache against the reference's one pass."""
    whole, chunked = pair.case(replace(scenario, schedule=(scenario.length,))), pair.case(scenario)
    truth = run_truth(pair, whole, forward)
    judgements = []
    for name in scenario.dtypes:
        candidate = _joined(run_candidate(pair, chunked, forward, DTYPES[name]))
        judgements += hold_against(pair, whole, forward, truth, candidate, name)
    return judgements


def _joined(record: Record) -> Record:
    """The outputs of all steps as one, and the cache after the last."""
    last = max(quantity.step for quantity in record.quantities)
    outputs = [value for q, value in zip(record.quantities, record.values, strict=True) if q.name == "output"]
    caches = [
        (Quantity(q.name, "cache"), value)
        for q, value in zip(record.quantities, record.values, strict=True)
        if q.verdict == "cache" and q.step == last
    ]
    quantities = [Quantity("output", "output"), *(quantity for quantity, _ in caches)]
    values = [torch.cat(outputs, dim=1), *(value for _, value in caches)]
    return Record(quantities, values, [None] * len(values))


PROPERTY = Property(
    "chunks",
    "gives the full forward's result for any split into chunks",
    lambda family, layer: layer.kind.attends and layer.causal,
    scenarios,
    judge,
)
