"""`parity functions`: a table of what is no layer, a row per function."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from parity.function import Function, Outcome, find, functions, hold
from parity.table import Bar, as_json, write_atomically
from parity.workers import prepare


def run(names: Sequence[str], examples: int | None, seed: int, json: Path | None, console: Console) -> int:
    """Hold functions against their references, print a table, and return the exit code: 0 if all hold, else 1.

    Raises:
        FamilyError: for an unknown function.
        ReportError: if the report cannot be written.
    """
    chosen = [find(name) for name in names] or list(functions().values())
    profile, start = prepare(), time.perf_counter()
    console.print(f"torch {torch.__version__}; profile {profile}, seed {seed}", highlight=False)
    outcomes = []
    for function in chosen:
        with console.status(f"{function.name} ..."):
            outcomes.append(hold(function, examples, seed))
    _print(chosen, outcomes, console)
    failed = [outcome.difference for outcome in outcomes if outcome.difference is not None]
    for difference in failed:
        console.print()
        console.print(str(difference), markup=False, highlight=False)
    if json is not None:
        report = {"seconds": time.perf_counter() - start, "bars": bars(chosen, outcomes)}
        write_atomically(json, as_json(report))
    return 1 if failed else 0


def _print(chosen: Sequence[Function], outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("function", "reference", "verdicts"):
        table.add_column(name)
    for name in ("examples", "seconds"):
        table.add_column(name, justify="right")
    for function, outcome in zip(chosen, outcomes, strict=True):
        failed = {j.quantity.verdict for j in outcome.difference.failed} if outcome.difference else set()
        cells = [
            f"[{'red' if verdict in failed else 'green'}]{verdict} {'FAILS' if verdict in failed else 'holds'}[/] "
            f"{worst.error:.0e} of {worst.allowed:.0e} {worst.dtype}".replace("0e+00", "0").rstrip()
            for verdict, worst in outcome.worst.items()
        ]
        table.add_row(
            function.name, function.reference, ", ".join(cells), f"{outcome.cases:,}", f"{outcome.seconds:.2f}"
        )
    console.print(table)


def bars(chosen: Sequence[Function], outcomes: Sequence[Outcome]) -> list[Bar]:
    """One bar per function and verdict: the error in units of what is allowed, which must not exceed 1."""
    return [
        {
            "name": f"{function.name}/{verdict}",
            "value": worst.ratio,
            "unit": "allowance",
            "bar": 1.0,
            "holds": worst.ratio <= 1,
        }
        for function, outcome in zip(chosen, outcomes, strict=True)
        for verdict, worst in outcome.worst.items()
    ]
