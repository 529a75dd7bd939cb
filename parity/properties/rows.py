"""What does not concern a token changes nothing: padding, the other rows, their order, other documents, the future."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity import strategies
from parity.case import Case
from parity.compare import Judgement, Quantity, Record
from parity.compare import judge as hold_against
from parity.family import Family, Layer
from parity.pair import Pair, entries_of, forward, run_candidate
from parity.property import Property
from parity.scenario import Scenario
from parity.strategies import Pool

Change = tuple[str, Case, Record]


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Padded and packed rows, in any chunks."""
    return strategies.scenarios(family, layer, pool, packed=True, far=False, stack=2)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Hold the candidate's values after each change against its own before, where they must be equal."""
    case = pair.case(scenario)
    before = run_candidate(pair, case, forward, torch.float64)
    judgements = []
    for what, changed, expected in changes(case, before):
        after = run_candidate(pair, changed, forward, torch.float64)
        quantities = [Quantity(f"{q.name} after {what}", q.verdict, q.step) for q in expected.quantities]
        after = Record(quantities, after.values, after.valid)
        judgements += hold_against(Record(quantities, expected.values, expected.valid), after, [], torch.float64, "f64")
    return judgements


def changes(case: Case, before: Record) -> Iterator[Change]:
    """What is changed, the changed case, and what must come out of it."""
    rows, length = case.scenario.rows, case.scenario.length
    yield "a turn of the rows", case.varied(**_rows(case, torch.arange(rows).roll(1))), _rolled(before)
    yield "leaving out the other rows", case.varied(**_rows(case, torch.arange(1))), _first_row(before)
    if case.valid is not None:
        yield "other contents of the padding", case.varied(**_other_tokens(case, ~case.valid)), before
    if case.memory is not None and case.memory_valid is not None:
        memory = torch.where(case.memory_valid[..., None], case.memory, case.memory.flip(-1) - 1)
        yield "other contents of the memory's padding", case.varied(memory=memory), before
    if case.causal and length > 1:
        future = (torch.arange(length) >= length // 2).expand(rows, -1)
        yield "another future", case.varied(**_other_tokens(case, future)), _restricted(case, before, ~future)
    if case.document is not None:
        first = (case.document == 0).expand(rows, -1)
        yield "another first document", case.varied(**_other_tokens(case, first)), _restricted(case, before, ~first)


def _rows(case: Case, order: Tensor) -> dict[str, Tensor | None]:
    drawn = {name: getattr(case, name) for name in case.DRAWN}
    return {name: None if tensor is None else tensor[order] for name, tensor in drawn.items()}


def _other_tokens(case: Case, where: Tensor) -> dict[str, Tensor]:
    """Other ids and hidden states at some tokens, [rows, length]."""
    ids = torch.where(where, (case.ids + 1) % case.vocabulary, case.ids)
    return {"ids": ids, "x": torch.where(where[..., None], case.x.flip(-1) - case.scenario.scale, case.x)}


def _rolled(record: Record) -> Record:
    valid = [None if defined is None else defined.roll(1, 0) for defined in record.valid]
    return Record(record.quantities, [value.roll(1, 0) for value in record.values], valid)


def _first_row(record: Record) -> Record:
    return Record(
        record.quantities,
        [value[:1] for value in record.values],
        [None if valid is None else valid[:1] for valid in record.valid],
    )


def _restricted(case: Case, record: Record, where: Tensor) -> Record:
    """The record, defined only at some tokens, [rows, length], that are valid besides."""
    where = where if case.valid is None else where & case.valid
    defined = [entries_of(case, q, value, where) for q, value in zip(record.quantities, record.values, strict=True)]
    return Record(record.quantities, record.values, defined)


PROPERTY = Property(
    "rows",
    "does not depend on padding, on other rows and documents, or on the future",
    lambda family, layer: layer.kind.attends,
    scenarios,
    judge,
    dtypes=("f64",),
)
