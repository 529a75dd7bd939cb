"""`parity mistakes`: the whole catalogue made in our layers, and what the harness and the usual checks say of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from json import loads
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from parity import family as families
from parity import reference
from parity.detection import EXAMPLES, WIDE, WIDELY, Catch, Detection, Shown, detect
from parity.family import FamilyError
from parity.journal import Journal
from parity.mistakes import catalogue, find
from parity.mistakes import kinds as all_kinds
from parity.run import progress_bar
from parity.scenario import DTYPE_NAMES
from parity.table import as_json, write_atomically
from parity.usual import CHECKS
from parity.workers import finished, prepare

RECORD = Path(__file__).parents[1] / "fixtures" / "mistakes.json"
LOW = "bf16"
LEAST_LOW, MOST_SCENARIOS = 0.95, 5  # the bars: caught in bfloat16, and the median of scenarios until a catch
Planted = tuple[str, str]  # a mistake's name, and a model type
NAMES = {short: name for name, short in DTYPE_NAMES.items() if name != short}


def select(model: str | None, kinds: Sequence[str], names: Sequence[str]) -> list[Planted]:
    """Every mistake asked for, in every family asked for that can make it.

    Raises:
        FamilyError: for an unknown model type, kind or name, or if nothing is left.
    """
    known = sorted(all_kinds())
    for kind in kinds:
        if kind not in known:
            close = get_close_matches(kind, known, n=1)
            nearest = f"; did you mean {close[0]!r}?" if close else ""
            raise FamilyError(f"unknown kind of mistake {kind!r}{nearest}; known are {', '.join(known)}")
    wanted = [find(name) for name in names] or list(catalogue())
    models = families.names() if model is None else [families.load(model).model_type]
    chosen = [
        (mistake.name, model_type)
        for mistake in wanted
        for model_type in models
        if model_type in mistake.where and (not kinds or mistake.kind in kinds)
    ]
    if not chosen:
        raise FamilyError("no mistake of those chosen can be made there; leave out MODEL, --kind or --name")
    return chosen


def detect_all(
    chosen: Sequence[Planted], examples: int, seed: int, workers: int, console: Console, log: Path | None = None
) -> list[Detection]:
    """Make every mistake chosen, several at a time in processes of their own.

    Args:
        log: notes every result there, and goes on from those that it holds.

    Raises:
        ReportError: if the log is of another run or cannot be written.
    """
    prepare()
    run = {"reference": reference.version(), "torch": torch.__version__, "seed": seed, "scenarios": examples}
    journal = None if log is None else Journal(log, run, Detection, read)
    known = {} if journal is None else {(each.mistake, each.model): each for each in journal.done}
    left = [planted for planted in chosen if planted not in known]
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=len(chosen), completed=len(chosen) - len(left))
        for each in finished(partial(_detect, examples, seed), left, workers):
            known[each.mistake, each.model] = each
            if journal is not None:
                journal.add(each)
            progress.update(bar, advance=1, description=each.mistake[:32])
    if journal is not None:
        journal.close()
    return [known[planted] for planted in chosen]


def read(line: Mapping[str, Any]) -> Detection:
    """A detection from the fields of a line of the log."""
    shown = {name: Shown(**each) for name, each in line["shown"].items()}
    caught = {name: Catch(**each) for name, each in line["caught"].items()}
    nearest = {name: Shown(**each) for name, each in line["nearest"].items()}
    listed = {name: tuple(line[name]) for name in ("dtypes", "unchanged")}
    return Detection(**{**line, **listed, "shown": shown, "caught": caught, "nearest": nearest})


def _detect(examples: int, seed: int, planted: Planted) -> Detection:
    name, model_type = planted
    return detect(find(name), model_type, examples, seed)


def prove(
    chosen: Sequence[Planted],
    examples: int,
    seed: int,
    workers: int,
    log: Path | None,
    json: Path | None,
    console: Console,
) -> int:
    """Make the mistakes chosen, print what is seen of them, and return the exit code: 0 if every bar holds.

    Args:
        log: notes every result there, goes on from those that it holds, and keeps the summary of these kinds.

    Raises:
        ReportError: if the log is of another run or cannot be written.
    """
    found = detect_all(chosen, examples, seed, workers, console, log)
    print_detections(found, console)
    print_summary(found, console)
    if json is not None:
        write_atomically(json, as_json({"bars": bars(found), "mistakes": [asdict(each) for each in found]}))
    if log is not None:
        write_atomically(RECORD, as_json(recorded(found)) + "\n")
    return 0 if all(bar["holds"] for bar in bars(found)) else 1


def print_detections(found: Sequence[Detection], console: Console) -> None:
    """A row per mistake and family, under a heading per kind."""
    dtypes = [name for name in ("f64", "f32", "bf16", "f16") if any(name in each.dtypes for each in found)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("mistake", "layer", *(NAMES[name] for name in dtypes), *CHECKS):
        table.add_column(name, no_wrap=True)
    for kind in dict.fromkeys(each.kind for each in found):
        table.add_row(f"[bold]{kind}[/bold]")
        for each in found:
            if each.kind == kind:
                cells = [_cell(each, name) for name in dtypes]
                checks = [_check(each.usual.get(name)) for name in CHECKS]
                table.add_row(f"  {each.mistake}", f"{each.model} {each.layer}", *cells, *checks)
    console.print(table)


def _cell(each: Detection, dtype: str) -> str:
    if dtype not in each.dtypes:
        return "[dim]-[/dim]"
    if dtype not in each.caught:
        return "[red]NOT CAUGHT[/red]" if dtype in WIDELY else "[yellow]not caught[/yellow]"
    catch, shown = each.caught[dtype], each.shown.get(dtype)
    return f"{catch.verdict} {catch.times if shown is None else shown.times:.0e} @{catch.after}"


def _check(passes: bool | None) -> str:
    return "[dim]-[/dim]" if passes is None else "[red]passes[/red]" if passes else "sees it"


def bars(found: Sequence[Detection]) -> list[dict[str, Any]]:
    """What the catalogue promises: caught, widely, soon."""
    listed = []
    for dtype in dict.fromkeys(name for each in found for name in each.dtypes):
        looked = [each for each in found if dtype in each.dtypes]
        caught = [each for each in looked if dtype in each.caught]
        least = 1.0 if dtype in WIDELY else LEAST_LOW
        share = len(caught) / len(looked)
        listed.append(_bar(f"caught in {NAMES[dtype]}", share, "share", least, share >= least))
        if dtype in WIDELY:
            times = min(each.shown[dtype].times if dtype in each.shown else 0.0 for each in looked)
            listed.append(
                _bar(f"least error in {NAMES[dtype]} where it must show", times, "allowances", WIDE, times >= WIDE)
            )
    if after := [catch.after for each in found for catch in each.caught.values()]:
        middle = median(after)
        listed.append(
            _bar("scenarios until a catch, median", middle, "scenarios", MOST_SCENARIOS, middle <= MOST_SCENARIOS)
        )
        listed.append(_bar("scenarios until a catch, maximum", max(after), "scenarios", EXAMPLES, True))
    return listed


def _bar(name: str, value: float, unit: str, bar: float, holds: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": holds}


def print_summary(found: Sequence[Detection], console: Console) -> None:
    """How many were caught, how soon, what is not caught and why, and what the usual checks let pass."""
    entries, kinds = len({each.mistake for each in found}), len({each.kind for each in found})
    console.print(
        f"{entries} mistakes of {kinds} kinds, {len(found)} with their families; "
        f"{sum(each.seconds for each in found) / 60:.1f} CPU minutes",
        highlight=False,
    )
    for bar in bars(found):
        mark = "[green]holds[/green]" if bar["holds"] else "[red]FAILS[/red]"
        console.print(f"  {mark} {bar['name']}: {bar['value']:.4g} {bar['unit']} (bar {bar['bar']:g})", highlight=False)
    for each in found:
        for dtype in each.dtypes:
            if dtype not in each.caught:
                console.print(f"  not caught in {NAMES[dtype]}: {_reason(each, dtype)}", highlight=False)
    console.print(f"  the usual checks let pass: {', '.join(_passed(found))}", highlight=False)


def _reason(each: Detection, dtype: str) -> str:
    """Why a mistake was not caught in a dtype, as far as it was measured."""
    name, near, exact = f"{each.mistake} ({each.model} {each.layer})", each.nearest.get(dtype), each.shown.get("f64")
    if near is None:
        return f"{name}: no scenario drawn had anything to be judged"
    if dtype in each.unchanged:
        return f"{name}: it changes not one number, as what it rounds is rounded there anyway"
    worth = "" if exact is None else f"; in float64 it is worth {exact.error:.1e}"
    return (
        f"{name}: in all scenarios drawn its error stayed below what the reference's own rounding allows, "
        f"{near.times:.2f} of it at most ({near.error:.1e} of {near.allowed:.1e}){worth}"
    )


def _passed(found: Iterable[Detection]) -> Iterator[str]:
    found = list(found)
    for check in CHECKS:
        said = [each.usual[check] for each in found if check in each.usual]
        yield f"{check} {sum(said)} of {len(said)}"


def recorded(found: Sequence[Detection]) -> dict[str, Any]:
    """The record with these kinds in the place of what it said of them; what it says of kinds that are gone goes.

    That of another reference is begun anew.
    """
    new = summary(found)
    old = loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if any(old.get(name) != new[name] for name in ("reference", "torch")):
        return new
    known = {**old["kinds"], **new["kinds"]}
    return {**new, "kinds": {kind: known[kind] for kind in all_kinds() if kind in known}}


def summary(found: Sequence[Detection]) -> dict[str, Any]:
    """What the README shows of a run over the whole catalogue: by kind, how many were made and how many seen."""
    kinds = {}
    for kind in dict.fromkeys(each.kind for each in found):
        of_kind = [each for each in found if each.kind == kind]
        kinds[kind] = {
            "mistakes": sorted({each.mistake for each in of_kind}),
            "made": len(of_kind),
            "caught": {
                name: [sum(name in each.caught for each in of_kind), sum(name in each.dtypes for each in of_kind)]
                for name in (*WIDELY, LOW)
            },
            "not caught": [_reason(each, LOW) for each in of_kind if LOW in each.dtypes and LOW not in each.caught],
            "passed": {
                check: [
                    sum(each.usual.get(check, False) for each in of_kind),
                    sum(check in each.usual for each in of_kind),
                ]
                for check in CHECKS
            },
        }
    return {"reference": reference.version(), "torch": torch.__version__, "kinds": kinds}
