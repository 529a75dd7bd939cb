"""A cache that was cropped, reordered or reset goes on as the reference's does, and a new one knows of none before it.

State that survives a call is where a decode path goes wrong. One thing is done to the cache in a scenario, its seed
says which: after all chunks the cache is cropped to the first, or reset, or a new one is made, and other tokens follow;
or after the first chunk its rows are put into another order, as in beam search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity import strategies
from parity.case import Case, Step
from parity.compare import Judgement, Quantity, Record
from parity.family import Family, Kind, Layer
from parity.pair import Pair, Side, evaluate, input_of, tables_of
from parity.property import Property
from parity.scenario import Scenario
from parity.strategies import Pool


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Any chunks; no padding, as what rows hold there has no defined value, and may go to another row."""
    return strategies.scenarios(family, layer, pool, padded=False, far=False, stack=2)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Judge the cache after what is done to it, and all that follows."""
    what = operation_of(scenario)
    for measure in (left, followed):  # what follows a wrong state may not even run
        judgements = evaluate(pair, scenario, (partial(measure, what),))
        if not all(judgement.holds for judgement in judgements):
            break
    return judgements


def left(what: str, side: Side, case: Case) -> Record:
    """What a cache holds when something was done to it."""
    record = Record([], [], [])
    with torch.no_grad():
        cache, _, _ = OPERATIONS[what](side, case)
        held = torch.full((1, 1), 1.0 + side.tokens_in(cache), dtype=torch.float64)
        _note(record, Quantity(f"tokens held after {what}", "cache"), held)
        if held > 1:
            _note_cache(record, what, side, cache)
    return record


def followed(what: str, side: Side, case: Case) -> Record:
    """What a side gives after something was done to its cache."""
    record = Record([], [], [])
    with torch.no_grad():
        cache, other, steps = OPERATIONS[what](side, case)
        for step, results in _run(side, other, steps, cache):
            for name, value in results.items():
                _note(record, Quantity(f"{name} after {what}", "output", step.index), value)
            _note_cache(record, what, side, cache, step.index)
    return record


def _run(side: Side, case: Case, steps: Iterable[Step], cache: Any) -> Iterator[tuple[Step, dict[str, Tensor]]]:
    tables, x = tables_of(side, case), input_of(side, case)
    for step in steps:
        yield step, side(case, step, x[:, step.start : step.stop], tables, cache)


def _ran(side: Side, case: Case, steps: Iterable[Step]) -> Any:
    """A cache after some steps."""
    cache = side.new_cache()
    for _ in _run(side, case, steps, cache):
        pass
    return cache


def _note_cache(record: Record, what: str, side: Side, cache: Any, step: int = 0) -> None:
    for name, value in side.cache_contents(cache):
        _note(record, Quantity(f"{name} after {what}", "cache", step), value)


def _note(record: Record, quantity: Quantity, value: Tensor) -> None:
    record.quantities.append(quantity)
    record.values.append(value)
    record.valid.append(None)


Prepared = tuple[Any, Case, Iterable[Step]]
"""A cache to which something was done, and what follows."""


def _crop(side: Side, case: Case) -> Prepared:
    first, *rest = case.steps
    cache = _ran(side, case, case.steps)
    side.crop(cache, case.scenario.length - first.stop)
    return cache, _other_tokens(case), rest


def _reorder(side: Side, case: Case) -> Prepared:
    first, *rest = case.steps
    cache = _ran(side, case, [first])
    side.reorder(cache, torch.arange(case.scenario.rows).roll(1))
    return cache, case, rest


def _reset(side: Side, case: Case) -> Prepared:
    cache = _ran(side, case, case.steps)
    side.reset(cache)
    return cache, _other_tokens(case), case.steps


def _renew(side: Side, case: Case) -> Prepared:
    _ran(side, case, case.steps)
    return side.new_cache(), _other_tokens(case), case.steps


OPERATIONS: dict[str, Callable[[Side, Case], Prepared]] = {
    "a crop": _crop,
    "another order of rows": _reorder,
    "a reset": _reset,
    "another prompt": _renew,
}


def operation_of(scenario: Scenario) -> str:
    """What is done to the cache: a sliding one that is full cannot be cropped, one chunk leaves nothing to crop to."""
    names = list(OPERATIONS)
    if len(scenario.schedule) == 1:
        names = names[2:]
    elif scenario.values.get("window"):
        names = names[1:]
    return names[scenario.seed % len(names)]


def _other_tokens(case: Case) -> Case:
    """The same case with other ids and hidden states, at the same positions."""
    other = case.varied(ids=(case.ids + 1) % case.vocabulary, x=case.x.flip(-1) - case.scenario.scale)
    other.tables = case.tables
    return other


def applies(family: Family, layer: Layer) -> bool:
    """The lowest layer with a cache, and a whole model; between the two nothing is done to one."""
    if "attend" not in layer.axes or not layer.causal or layer.routes or layer.generates:
        return False
    lowest = next((each for each in family.layers if each.kind is Kind.ATTENTION and each.causal and each.caches), None)
    return layer.caches and (layer is lowest or layer.kind is Kind.MODEL)


PROPERTY = Property(
    "reuse",
    "goes on from a cropped, reordered or reset cache as the reference does, and from a new one as from the first",
    applies,
    scenarios,
    judge,
    dtypes=("f64",),
    located=False,
)
