"""A run: every property over every layer that was selected, a progress bar while it lasts, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from hypothesis import settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from parity import family as families
from parity import property as properties
from parity.family import Family, Layer
from parity.mismatch import Mismatch
from parity.pair import pair_of
from parity.property import Property
from parity.runner import Tally, check, hold
from parity.scenario import DTYPE_NAMES, DTYPES, ScenarioError, parse_scenario
from parity.table import bars, check_place, print_header, print_rows, write_json
from parity.workers import finished, prepare

Row = tuple[Family, Layer, Property]


@dataclass(frozen=True)
class Selection:
    """What to run."""

    rows: tuple[Row, ...]
    dtypes: tuple[str, ...]
    left_out: tuple[str, ...] = ()  # properties that are not stated in these dtypes


def select(model: str | None, layers: Sequence[str], names: Sequence[str], dtypes: Sequence[str]) -> Selection:
    """Everything asked for: all families, layers, properties and dtypes that are not restricted.

    Raises:
        FamilyError: for an unknown family, layer or property.
        ScenarioError: for an unknown dtype.
    """
    chosen = [properties.find(name) for name in names] or list(properties.properties().values())
    for name in dtypes:
        if name not in DTYPE_NAMES:
            raise ScenarioError(f"unknown dtype {name!r}; known are {', '.join(n for n in DTYPE_NAMES if len(n) > 4)}")
    wanted = tuple(dict.fromkeys(DTYPE_NAMES[name] for name in dtypes)) or tuple(DTYPES)
    rows = tuple(_rows([model] if model else families.names(), layers, chosen, wanted))
    if not rows:
        raise families.FamilyError(
            "nothing to run: no property of those chosen says anything of these layers and dtypes"
        )
    return Selection(rows, wanted, tuple(prop.name for prop in chosen if not set(prop.dtypes) & set(wanted)))


def _rows(
    models: Sequence[str], layers: Sequence[str], chosen: Sequence[Property], dtypes: Sequence[str]
) -> Iterator[Row]:
    for model in models:
        family = families.load(model)
        for layer in [family.layer(name) for name in layers] or family.layers:
            for prop in chosen:
                if prop.applies(family, layer) and set(prop.stated_in(layer)) & set(dtypes):
                    yield family, layer, prop


@dataclass(frozen=True)
class Reports:
    """Where to write what a run has shown, if anywhere."""

    json: Path | None = None
    html: Path | None = None

    def check(self) -> None:
        """Refuse, before any work is done, places where nothing can be written.

        Raises:
            ReportError: naming the place.
        """
        for path in (self.json, self.html):
            if path is not None:
                check_place(path)

    def write(self, rows: Sequence[Row], tallies: Sequence[Tally], seconds: float) -> None:
        """Write them.

        Raises:
            ReportError: naming the file and what kept it from being written.
        """
        if self.json is not None:
            write_json(self.json, rows, tallies, seconds)
        if self.html is not None:
            from parity.report.of_run import write_page

            write_page(self.html, rows, tallies, seconds)


def run(
    selection: Selection, examples: int | None, seed: int, reports: Reports, console: Console, workers: int = 1
) -> int:
    """Run a selection, print its table, and return the exit code: 0 if all holds but for gaps, 1 for a mismatch."""
    profile, start = prepare(), time.perf_counter()
    each = examples or settings().max_examples
    print_header(console, profile, each, seed)
    if selection.left_out:
        console.print(f"left out, as not stated in these dtypes: {', '.join(selection.left_out)}", highlight=False)
    tallies: dict[int, Tally] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("", total=each * len(selection.rows))
        for number, tally in _tallies(selection, each, seed, workers, lambda: progress.advance(task)):
            tallies[number] = tally
            progress.update(task, completed=len(tallies) * each, description=" ".join(names_of(selection.rows[number])))
    in_order = [tallies[number] for number in range(len(selection.rows))]
    return _conclude(selection.rows, in_order, time.perf_counter() - start, reports, console)


def _tallies(
    selection: Selection, examples: int, seed: int, workers: int, on_scenario: Callable[[], None]
) -> Iterator[tuple[int, Tally]]:
    """The rows' tallies by number. By several processes whole models come first, as they take longest."""
    workers = min(workers, len(selection.rows))
    if workers == 1:
        for number, row in enumerate(selection.rows):
            yield number, _tally(row, selection.dtypes, examples, seed, on_scenario)
        return
    family, layer, _ = selection.rows[0]
    pair_of(family.model_type, layer.name, ()).reference(torch.float64)  # imports what all processes need
    numbered = [(number, *names_of(row)) for number, row in enumerate(selection.rows)]
    yield from finished(partial(_numbered, selection.dtypes, examples, seed), reversed(numbered), workers)


def names_of(row: Row) -> tuple[str, str, str]:
    """A row by the names of its family, layer and property, as it can be told to another process."""
    family, layer, prop = row
    return family.model_type, layer.name, prop.name


def row_of(model: str, layer: str, prop: str) -> Row:
    """The row of these names."""
    family = families.load(model)
    return family, family.layer(layer), properties.find(prop)


def _numbered(
    dtypes: Sequence[str], examples: int, seed: int, numbered: tuple[int, str, str, str]
) -> tuple[int, Tally]:
    number, *names = numbered
    return number, _tally(row_of(*names), dtypes, examples, seed)


def _tally(
    row: Row, dtypes: Sequence[str], examples: int, seed: int, on_scenario: Callable[[], None] = lambda: None
) -> Tally:
    family, layer, prop = row
    return hold(prop, family, layer, dtypes, examples=examples, seed=seed, on_scenario=on_scenario)


def run_scenario(selection: Selection, line: str, reports: Reports, console: Console) -> int:
    """Run one scenario through the properties selected that are stated in its dtypes, and return the exit code.

    Raises:
        FamilyError: if there are none.
    """
    profile, start = prepare(), time.perf_counter()
    given = parse_scenario(line)
    print_header(console, profile, 1, given.seed)
    rows, tallies = [], []
    for family, layer, prop in selection.rows:
        dtypes = tuple(name for name in given.dtypes if name in prop.dtypes and name in selection.dtypes)
        if not dtypes:
            continue
        scenario = replace(given, dtypes=dtypes)
        family.point(layer, scenario.values)
        tally, began = Tally(), time.perf_counter()
        try:
            check(prop, family, layer, scenario, tally)
        except Mismatch as mismatch:
            tally.mismatch = mismatch
        tally.seconds = time.perf_counter() - began
        rows.append((family, layer, prop))
        tallies.append(tally)
    if not rows:
        raise families.FamilyError(
            f"nothing to run: no property of those chosen is stated in {', '.join(given.dtypes)}"
        )
    return _conclude(rows, tallies, time.perf_counter() - start, reports, console)


def _conclude(rows: Sequence[Row], tallies: Sequence[Tally], seconds: float, reports: Reports, console: Console) -> int:
    print_rows(console, rows, tallies, seconds)
    known = {name: mismatch for tally in reversed(tallies) for name, mismatch in tally.gaps.items()}
    failed = [tally.mismatch for tally in tallies if tally.mismatch is not None]
    for mismatch, others in [*((gap, ()) for gap in known.values()), *grouped(failed)]:
        console.print()
        console.print(str(mismatch), markup=False, highlight=False)
        for other in others:
            console.print(f"  same      {other.again}", markup=False, highlight=False)
    reports.write(rows, tallies, seconds)
    return 0 if all(bar["holds"] for bar in bars(rows, tallies)) else 1


def grouped(mismatches: Sequence[Mismatch]) -> list[tuple[Mismatch, list[Mismatch]]]:
    """Each mismatch with those that come of the same: explained by the same mistakes, or parting at the same place."""
    groups: list[tuple[Mismatch, list[Mismatch]]] = []
    for mismatch in mismatches:
        for first, others in groups:
            if mismatch.comes_of_the_same_as(first):
                others.append(mismatch)
                break
        else:
            groups.append((mismatch, []))
    return groups


def progress_bar(console: Console) -> Progress:
    """How far a run is; nothing where no terminal is at the other end."""
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
