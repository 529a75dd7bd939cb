"""How many of the installed model types can serve as a reference, and why the others cannot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from parity import reference
from parity.check import drive, replay
from parity.check.record import Recorder
from parity.check.subject import IMPLEMENTATIONS, SubjectError
from parity.tiny import models, sensitive
from parity.tiny.models import PLAIN

SERVING_BAR = 0.9
"""The part of the model types of each task that must have a tiny model."""


@dataclass(frozen=True)
class Reference:
    """What came of one model type with the head of one task.

    Attributes:
        recipe: how the tiny configuration was made; empty if none serves.
        reason: why it cannot serve; empty if it does.
        classes: the names of the modules that the tiny model consists of.
        scenarios: the reason of each scenario that the model does not go through; None for the others.
        replayed, exact: calls of modules that were recorded and replayed, and those which came out equal to the bit.
        inexact: a line for each class of which a call did not.
    """

    model_type: str
    task: str
    recipe: str = ""
    reason: str = ""
    classes: tuple[str, ...] = ()
    scenarios: tuple[tuple[str, str | None], ...] = ()
    replayed: int = 0
    exact: int = 0
    inexact: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        return not self.reason


def survey(tasks: Sequence[str], words: Sequence[str], replays: bool, console: Console) -> list[Reference]:
    """Look at every model type of some tasks whose name contains one of the words, or at all without any."""
    wanted = [
        (task, model_type)
        for task in tasks
        for model_type in models.model_types(task)
        if not words or any(word in model_type for word in words)
    ]
    found = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress, models.quietly():
        bar = progress.add_task("", total=len(wanted))
        for task, model_type in wanted:
            progress.update(bar, description=f"{task} {model_type}")
            found.append(look(model_type, task, drive.names(task) if replays else ()))
            progress.advance(bar)
    return found


def look(model_type: str, task: str, scenarios: Sequence[str] = ()) -> Reference:
    """Whether a model type has a tiny model, and whether all that its modules are called with replays exactly."""
    try:
        recipe, _ = models.plain(model_type, task)
        model = models.model(model_type, task, PLAIN, torch.float32)
    except models.Unshrinkable as error:
        return Reference(model_type, task, reason=str(error).removeprefix(f"{model_type}: "))
    sensitive.load(model, sensitive.state(model))
    classes = tuple(sorted({type(module).__name__ for module in model.modules() if is_theirs(module)}))
    results = {name: replay_all(model, task, name) for name in scenarios}
    driven = tuple((name, result) for name, (result, _) in results.items())
    calls = [call for _, found in results.values() for call in found]
    wrong = Counter(name for name, differing in calls if differing)
    return Reference(
        model_type,
        task,
        recipe,
        classes=classes,
        scenarios=driven,
        replayed=len(calls),
        exact=sum(not differing for _, differing in calls),
        inexact=tuple(f"{name} ({count} calls: {_first(calls, name)})" for name, count in wrong.items()),
    )


def _first(calls: Sequence[tuple[str, list[str]]], name: str) -> str:
    return ", ".join(next(differing for each, differing in calls if each == name and differing)[:3])


def is_theirs(module: nn.Module) -> bool:
    """Whether a module is of a class that transformers defines."""
    return type(module).__module__.startswith("transformers.")


def replay_all(model: nn.Module, task: str, scenario: str) -> tuple[str | None, list[tuple[str, list[str]]]]:
    """Record a scenario at every module of transformers' own and replay each call on the module where it was recorded.

    Returns:
        Why the model does not go through the scenario, or None; and for each call the module's class, and the names of
        what came out otherwise.
    """
    parts = {path: module for path, module in model.named_modules() if is_theirs(module)}
    recorder = Recorder(parts)
    try:
        drive.drive(model, task, drive.TEXTS[scenario], recorder)
    except drive.Undriven as error:
        return str(error), []
    return None, [(type(parts[call.path]).__name__, _replayed(parts[call.path], call)) for call in recorder.calls]


def _replayed(module: nn.Module, call: Any) -> list[str]:
    try:
        return replay.equal(call, replay.exactly(module, call))
    except Exception as error:
        return [f"raises {models.brief(error)}"]


def bars(found: Sequence[Reference]) -> list[dict[str, Any]]:
    """For each task the part that serves, and over all the part of the calls that replay exactly."""
    listed = []
    for task in models.TASKS:
        of_task = [each for each in found if each.task == task]
        if of_task:
            value = sum(each.serves for each in of_task) / len(of_task)
            listed.append(_bar(f"{task} model types that serve", value, SERVING_BAR))
    if replayed := sum(each.replayed for each in found):
        listed.append(_bar("calls that replay exactly", sum(each.exact for each in found) / replayed, 1.0))
    return listed


def _bar(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "part", "bar": bar, "holds": value >= bar}


def print_found(found: Sequence[Reference], seconds: float, console: Console) -> None:
    """What serves, in a line per task; what does not, with its reason; what does not replay exactly."""
    console.print(f"{reference.version()}, torch {torch.__version__}; attention as {' and '.join(IMPLEMENTATIONS)}")
    few = len(found) <= DETAILED
    for task in models.TASKS:
        of_task = [each for each in found if each.task == task]
        if of_task:
            serving = sum(each.serves for each in of_task)
            console.print(f"{task}: {serving} of {len(of_task)} model types serve", highlight=False)
    if missing := [each for each in found if not each.serves]:
        console.print(_table(("model type", "task", "why it cannot serve"), map(_refusal, missing)))
    if few:
        rows = ((each.model_type, each.task, each.recipe, ", ".join(each.classes)) for each in found if each.serves)
        console.print(_table(("model type", "task", "recipe", "classes"), rows))
    if any(each.scenarios for each in found):
        print_replays(found, console)
    console.print(f"{seconds:.0f} s", highlight=False)


DETAILED = 8
"""So many model types are listed with all their classes."""


def _refusal(each: Reference) -> tuple[str, str, str]:
    return each.model_type, each.task, each.reason


def print_replays(found: Sequence[Reference], console: Console) -> None:
    """How many calls replay exactly, which do not, and which models do not go through which scenario."""
    exact, replayed = sum(each.exact for each in found), sum(each.replayed for each in found)
    classes = sum(len(each.classes) for each in found if each.serves)
    console.print(f"{exact:,} of {replayed:,} calls of {classes:,} classes replay to the bit", highlight=False)
    rows = [(each.model_type, each.task, line) for each in found for line in each.inexact]
    if rows:
        console.print(_table(("model type", "task", "does not replay exactly"), rows))
    refused = [
        (each.model_type, each.task, name, reason)
        for each in found
        for name, reason in each.scenarios
        if reason is not None
    ]
    for name, count in Counter(row[2] for row in refused).items():
        console.print(f"scenario {name}: {count} model types do not go through it", highlight=False)
    if refused and len(found) <= DETAILED:
        console.print(_table(("model type", "task", "scenario", "why not"), refused))


def _table(names: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def run(tasks: Sequence[str], words: Sequence[str], replays: bool, console: Console) -> dict[str, Any]:
    """Survey, print, and return the report with its bars.

    Raises:
        SubjectError: for an unknown task, or if no model type has any of the words in its name.
    """
    tasks = tasks or list(models.TASKS)
    if unknown := [task for task in tasks if task not in models.TASKS]:
        raise SubjectError(f"no task {unknown[0]!r}; there are {', '.join(models.TASKS)}")
    if words and not any(word in name for word in words for task in tasks for name in models.model_types(task)):
        raise SubjectError(f"no {' or '.join(tasks)} model type has {' or '.join(map(repr, words))} in its name")
    start = time.perf_counter()
    found = survey(tasks, words, replays, console)
    seconds = time.perf_counter() - start
    print_found(found, seconds, console)
    return {
        "reference": reference.version(),
        "torch": torch.__version__,
        "seconds": seconds,
        "bars": bars(found),
        "references": [asdict(each) for each in found],
    }
