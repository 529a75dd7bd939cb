"""`parity check`: run it in a process of its own, print what came out, and write it down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from parity.check import session
from parity.check.candidate import said
from parity.check.result import Result
from parity.check.sandbox import Gone, run
from parity.check.session import Options
from parity.check.subject import SubjectError
from parity.compare import VERDICTS
from parity.errors import BAD_INPUT, InputError
from parity.table import as_json, check_place, write_atomically
from reimpl.weights import WeightError


@dataclass(frozen=True)
class Files:
    """Where to write what was found, if anywhere."""

    json: Path | None = None
    rules: Path | None = None
    card: Path | None = None
    html: Path | None = None


def command(options: Options, files: Files, console: Console) -> int:
    """Check, print and write; the exit code: 0 if everything holds, 1 if not.

    Raises:
        InputError: for a candidate, a reference or rules that are not there, or cannot be built.
        ReportError: if something cannot be written.
    """
    for path in (files.json, files.rules, files.card, files.html):
        if path is not None:
            check_place(path)
    result = checked(options, console)
    report(result, console)
    if files.rules is not None:
        write_atomically(files.rules, result.rules)
        console.print(f"rules of the weights: {files.rules}", highlight=False)
    if files.json is not None:
        write_atomically(files.json, as_json(result.plain()))
    if files.html is not None:
        from parity.report.of_check import page_of_check
        from parity.report.page import render

        write_atomically(files.html, render(page_of_check(result.plain(), verdict(result))))
    if files.card is not None:
        from parity.check.card import card

        write_atomically(files.card, card(result.plain()))
    return 0 if result.holds else 1


def checked(options: Options, console: Console | None = None) -> Result:
    """The result of a check, run in a process of its own.

    Raises:
        InputError: see `command`.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=console is None or not console.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=None)

        at = "its start"

        def tell(kind: str, value: Any) -> None:
            nonlocal at
            if kind == "of":
                progress.update(task, total=value)
            elif kind == "at":
                at = value
                progress.update(task, description=value[:60], advance=1)

        try:
            outcome = run(partial(session.check, options), options.limits, tell)
        except (SubjectError, WeightError) as error:
            raise InputError(str(error)) from error
        except BAD_INPUT:
            raise
        except Exception as error:  # the last resort: no candidate, however odd, ends in a traceback
            line = f"parity check {options.name} --against {options.against}"
            raise InputError(
                f"{at}: parity itself fails: {said(error)}; unless the candidate exchanges parts of"
                f" torch or transformers, please report it with this line: {line}"
            ) from error
    if isinstance(outcome, Gone):
        return gone(options, outcome)
    return outcome


def gone(options: Options, what: Gone) -> Result:
    """The result of a check that did not come to its end."""
    line = {
        "property": "forward",
        "dtype": "",
        "headline": f"{options.name} / {options.against}   candidate fails",
        "lines": [["what", what.what], ["at", what.at]],
    }
    row = {"property": "forward", "dtype": "", "result": "fails", "cases": 0, "seconds": 0.0, "cells": {}, "worst": {}}
    return Result(options.name, options.against, {}, [], [], [], [], [row | {"failures": []}], [line], None)


def report(result: Result, console: Console) -> None:
    """Print a result: the table, how the weights were found, what to note, and every mismatch."""
    said = ", ".join(f"{name} {text}" if name == "torch" else text for name, text in result.versions.items())
    count = len(result.configurations)
    console.print(f"{result.candidate} against {result.reference}; {said}; {count} configurations", highlight=False)
    if result.configurations:
        _print_weights(result, console)
        console.print(_table(result))
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(verdict(result), markup=False, highlight=False)
    if result.mistakes:
        _print_mistakes(result, console)
    for mismatch in result.mismatches:
        console.print()
        console.print(mismatch_text(mismatch), markup=False, highlight=False)


def _print_mistakes(result: Result, console: Console) -> None:
    """How many mistakes the scenarios catch in this layer, and which they do not."""
    caught = sum(mistake["caught"] for mistake in result.mistakes)
    console.print(
        f"mistakes made in this layer from outside: {caught} of {len(result.mistakes)} caught", highlight=False
    )
    for mistake in result.mistakes:
        if not mistake["caught"]:
            console.print(f"  not caught: {mistake['name']} ({mistake['kind']})", markup=False, highlight=False)


def _print_weights(result: Result, console: Console) -> None:
    if not result.weights:
        console.print("weights: by equal names", highlight=False)
        return
    console.print("weights: by these rules; --write-weights FILE writes them down", highlight=False)
    for line in result.weights:
        unsure = "   (a guess: something else fits as well)" if line in result.unsure else ""
        console.print(f"  {line}{unsure}", markup=False, highlight=False)


def _table(result: Result) -> Table:
    shown = [verdict for verdict in VERDICTS if any(row["cells"].get(verdict, "-") != "-" for row in result.rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("property", "dtype", *shown):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        cells = [_coloured(row["cells"].get(verdict, "-")) for verdict in shown]
        table.add_row(row["property"], row["dtype"], *cells, f"{row['cases']:,}", f"{row['seconds']:.2f}")
    return table


def _coloured(cell: str) -> str:
    colour = {"F": "red", "h": "green"}.get(cell[0], "dim")
    word, _, rest = cell.partition(" ")
    return f"[{colour}]{word}[/{colour}] {rest}".strip()


def verdict(result: Result) -> str:
    """The outcome in one sentence."""
    failed = [row for row in result.rows if row["result"] == "fails"]
    idle = [f"{row['property']} {row['dtype']}" for row in result.rows if row["result"] == "not run"]
    cases = sum(row["cases"] for row in result.rows)
    ties, choices = (sum(row.get(name, 0) for row in result.rows) for name in ("near_ties", "choices"))
    said = f"; {ties:,} of {choices:,} choices of experts were near-ties, which rounding decides" if choices else ""
    if failed:
        return f"{len(failed)} of {len(result.rows)} rows FAIL; {cases:,} calls{said}"
    if result.refused:
        return f"REFUSED as proof: {result.refused}"
    if idle:
        return f"NOT RUN: {', '.join(idle)}, for which no scenario serves; {cases:,} calls"
    return f"all {len(result.rows)} rows hold; {cases:,} calls{said}"


def mismatch_text(mismatch: dict[str, Any]) -> str:
    """A mismatch as it is printed."""
    return "\n".join([mismatch["headline"], *(f"  {label:<9} {text}" for label, text in mismatch["lines"])])
