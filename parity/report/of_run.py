"""The page about a run of our layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parity import reference
from parity.compare import VERDICTS
from parity.mismatch import Mismatch
from parity.pictures import pictures
from parity.report.page import Page, Told, render
from parity.runner import Tally
from parity.table import allowance, result_of, summary, write_atomically

if TYPE_CHECKING:
    from parity.run import Row


def write_page(path: Path, rows: Sequence[Row], tallies: Sequence[Tally], seconds: float) -> None:
    """Write the page about a run.

    Raises:
        ReportError: if it cannot be written, or what it is made with is not installed.
    """
    write_atomically(path, render(page_of_run(rows, tallies, seconds)))


def page_of_run(rows: Sequence[Row], tallies: Sequence[Tally], seconds: float) -> Page:
    """What a run has shown."""
    models = list(dict.fromkeys(family.model_type for family, _, _ in rows))
    return Page(
        title=f"{', '.join(models)} against {reference.version()}",
        versions=f"{reference.version()}, torch {torch.__version__}",
        holds=all(tally.mismatch is None for tally in tallies),
        summary=summary(tallies, seconds),
        rows=[_row(row, tally) for row, tally in zip(rows, tallies, strict=True)],
        mismatches=[told(mismatch) for mismatch in _mismatches(tallies)],
    )


def _mismatches(tallies: Sequence[Tally]) -> Iterator[Mismatch]:
    known = {name: mismatch for tally in reversed(tallies) for name, mismatch in tally.gaps.items()}
    yield from (tally.mismatch for tally in tallies if tally.mismatch is not None)
    yield from known.values()


def _row(row: Row, tally: Tally) -> dict[str, Any]:
    family, layer, prop = row
    cells = {verdict: cell for verdict in VERDICTS if (cell := _cell(tally, verdict)) is not None}
    name, cases = f"{family.model_type} {layer.name}", f"{tally.cases:,}"
    return {"name": name, "property": prop.name, "cells": cells, "cases": cases}


def _cell(tally: Tally, verdict: str) -> dict[str, str] | None:
    judgement, result = tally.worst.get(verdict), result_of(tally, verdict)
    text = "" if judgement is None else allowance(judgement)
    return None if result is None else {"result": result, "text": text}


def told(mismatch: Mismatch) -> Told:
    """All that a mismatch tells, with its pictures."""
    divergence = mismatch.divergence
    chain = None if divergence is None else divergence.chain
    headline, lines = mismatch.told
    return Told(
        headline,
        lines,
        pictures=pictures(mismatch),
        course=[] if chain is None else chain.course(),
        first=None if divergence is None else str(divergence.quantity),
    )
