"""A long run that must raise no alarm: all layers, in all their correct implementations, over very many scenarios.

Scenarios are drawn in batches. Each batch is a line of the log once it is done, so that a run which was stopped goes
on where it was, and a line can be repeated by its seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from parity import reference
from parity.journal import Journal
from parity.mismatch import MEASURED
from parity.run import Selection, names_of, progress_bar, row_of
from parity.runner import hold
from parity.workers import finished, prepare

BATCH = 100  # scenarios: a second or two, the most that a stopped run loses


@dataclass(frozen=True)
class Task:
    """A batch of scenarios: of one property over one layer, drawn with one seed."""

    model: str
    layer: str
    prop: str
    dtypes: tuple[str, ...]
    seed: int
    scenarios: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from the other batches of a run."""
        return self.model, self.layer, self.prop, self.seed


@dataclass(frozen=True)
class Done:
    """What a batch has shown: scenarios judged, cases, the error nearest to its allowance, and what failed, if any."""

    model: str
    layer: str
    prop: str
    seed: int
    scenarios: int
    cases: int
    worst: float
    gaps: int
    seconds: float
    failure: str | None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The batch it belongs to."""
        return self.model, self.layer, self.prop, self.seed


def tasks(selection: Selection, scenarios: int, seed: int) -> Iterator[Task]:
    """Batches over all rows in turn, until there are so many scenarios."""
    left, number = scenarios, 0
    while left > 0:
        for family, layer, prop in selection.rows:
            count = min(BATCH, left)
            if count == 0:
                return
            yield Task(family.model_type, layer.name, prop.name, selection.dtypes, seed + number, count)
            left -= count
        number += 1


def work(task: Task) -> Done:
    """Draw and judge a batch, a case per scenario."""
    family, layer, prop = row_of(task.model, task.layer, task.prop)
    start, failure = time.process_time(), None
    try:
        tally = hold(
            prop,
            family,
            layer,
            task.dtypes,
            examples=task.scenarios,
            seed=task.seed,
            stack=1,
        )
    except Exception as error:  # the harness itself failed: that is an alarm, too
        return Done(*task.key, 0, 0, 0.0, 0, time.process_time() - start, f"{type(error).__name__}: {error}")
    if tally.mismatch is not None:
        failure = str(tally.mismatch)
    worst = max((tally.worst[name].ratio for name in MEASURED if name in tally.worst), default=0.0)
    seconds = time.process_time() - start
    return Done(*task.key, tally.scenarios, tally.cases, worst, len(tally.gaps), seconds, failure)


def soak(selection: Selection, scenarios: int, seed: int, workers: int, log: Path, console: Console) -> list[Done]:
    """Run all batches that the log does not hold yet, and note each there.

    Raises:
        ReportError: if the log is of another run or cannot be written.
        KeyboardInterrupt: if somebody stops it; the log is then whole, and the same call goes on.
    """
    prepare()
    rows = sorted(set(map(names_of, selection.rows)))
    run = {
        "reference": reference.version(),
        "torch": torch.__version__,
        "scenarios": scenarios,
        "seed": seed,
        "dtypes": list(selection.dtypes),
        "rows": [" ".join(row) for row in rows],
    }
    written = Journal(log, run, Done)
    known = {done.key for done in written.done}
    left = [task for task in tasks(selection, scenarios, seed) if task.key not in known]
    with progress_bar(console) as progress:
        bar = progress.add_task("soak", total=scenarios, completed=sum(done.scenarios for done in written.done))
        try:
            for done in finished(work, left, workers):
                written.add(done)
                progress.update(bar, advance=done.scenarios, description=f"{done.model} {done.layer} {done.prop}")
        finally:
            written.close()
    return written.done


def report(done: Iterable[Done], scenarios: int, console: Console) -> list[dict[str, Any]]:
    """Print what a run has shown, and return its bars."""
    done = list(done)
    failed = [each for each in done if each.failure is not None]
    judged, cases = sum(each.scenarios for each in done), sum(each.cases for each in done)
    gaps, seconds = sum(each.gaps for each in done), sum(each.seconds for each in done)
    rows = len({(each.model, each.layer, each.prop) for each in done})
    for each in failed:
        console.print(f"\n{each.model} {each.layer} {each.prop}, seed {each.seed}:", highlight=False)
        console.print(each.failure, markup=False, highlight=False)
    alarms = "no alarm" if not failed else f"{len(failed)} ALARMS"
    console.print(
        f"{alarms} in {judged:,} scenarios over {rows} rows; {cases:,} cases in {seconds / 60:.1f} CPU minutes;"
        f" the error nearest to its allowance was {max((each.worst for each in done), default=0.0):.2f} of it;"
        f" {gaps} batches met a known gap of the reference",
        highlight=False,
    )
    return [
        {"name": "soak/alarms", "value": len(failed), "unit": "batches", "bar": 0, "holds": not failed},
        {
            "name": "soak/scenarios",
            "value": judged,
            "unit": "scenarios",
            "bar": scenarios,
            "holds": judged >= scenarios,
        },
    ]
