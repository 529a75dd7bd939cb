"""How a run is printed and written: a row per layer and property, a column per verdict."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import hypothesis
import torch
from rich.console import Console
from rich.table import Table

from parity import reference
from parity.compare import VERDICTS, Judgement
from parity.errors import ReportError
from parity.runner import Tally

if TYPE_CHECKING:
    from parity.run import Row


def print_header(console: Console, profile: str, examples: int, seed: int) -> None:
    """What is compared with what, so that a table can be read on its own."""
    versions = f"{reference.version()}, torch {torch.__version__}, hypothesis {hypothesis.__version__}"
    console.print(f"{versions}; profile {profile}, {examples} scenarios per row, seed {seed}", highlight=False)


def print_rows(console: Console, rows: Sequence[Row], tallies: Sequence[Tally], seconds: float) -> None:
    """The table of verdicts: in each cell the worst error and what was allowed, both relative."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "property", *VERDICTS):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for (family, layer, prop), tally in zip(rows, tallies, strict=True):
        cells = [_cell(tally, verdict) for verdict in VERDICTS]
        name = f"{family.model_type} {layer.name}"
        table.add_row(name, prop.name, *cells, f"{tally.cases:,}", f"{tally.seconds:.2f}")
    console.print(table)
    console.print(summary(tallies, seconds), highlight=False)


def _cell(tally: Tally, verdict: str) -> str:
    judgement, result = tally.worst.get(verdict), result_of(tally, verdict)
    text = "" if judgement is None else allowance(judgement)
    shown = {"fails": "[red]FAILS[/red]", "gap": "[yellow]gap[/yellow]", "holds": "[green]holds[/green]"}
    return "[dim]-[/dim]" if result is None else f"{shown[result]} {text}"


def result_of(tally: Tally, verdict: str) -> str | None:
    """What came out of a row for one verdict; None if it says nothing of it."""
    if tally.mismatch is not None and (verdict in tally.mismatch.verdicts or not tally.mismatch.verdicts):
        return "fails"
    if verdict in tally.worst and not tally.worst[verdict].holds:
        return "fails"  # in another scenario than the smallest
    if any(verdict in known.verdicts or not known.verdicts for known in tally.gaps.values()):
        return "gap"
    return "holds" if verdict in tally.worst else None


def result(tally: Tally) -> str:
    """What came out of a row: a gap where all that differs is the reference's own contradiction."""
    return "fails" if tally.mismatch is not None else "gap" if tally.gaps else "holds"


def allowance(judgement: Judgement) -> str:
    """An error beside what is allowed."""
    if judgement.allowed == 0:
        return f"{judgement.error:g} of 0"
    return f"{judgement.error:.0e} of {judgement.allowed:.0e} {judgement.dtype}"


def summary(tallies: Sequence[Tally], seconds: float) -> str:
    """What came out of a run, in a sentence."""
    cases, results = sum(tally.cases for tally in tallies), [result(tally) for tally in tallies]
    unjudged, failed, known = sum(tally.unjudged for tally in tallies), results.count("fails"), results.count("gap")
    everything = "the row holds" if len(tallies) == 1 else f"all {len(tallies)} rows hold"
    verdict = f"{failed} of {len(tallies)} rows FAIL" if failed else everything
    if known:
        verdict += f", {known} but for a known gap in the reference"
    said = f"; of {unjudged} quantities nothing could be said, the reference itself overflows" if unjudged else ""
    choices, near_ties = sum(tally.choices for tally in tallies), sum(tally.near_ties for tally in tallies)
    if choices:
        said += f"; {near_ties:,} of {choices:,} choices of experts were near-ties, which rounding decides"
    return f"{verdict}; {cases:,} cases in {seconds:.1f} s{said}"


Bar = dict[str, Any]


def bars(rows: Sequence[Row], tallies: Sequence[Tally]) -> list[Bar]:
    """One bar per row and verdict: the error in units of what is allowed, which must not exceed 1."""
    listed = []
    for (family, layer, prop), tally in zip(rows, tallies, strict=True):
        name = f"{family.model_type}/{layer.name}/{prop.name}"
        for verdict, judgement in tally.worst.items():
            value = judgement.ratio
            listed.append(
                {"name": f"{name}/{verdict}", "value": value, "unit": "allowance", "bar": 1.0, "holds": value <= 1}
            )
        if tally.mismatch is not None and not tally.mismatch.verdicts:
            listed.append({"name": name, "value": 1, "unit": "mismatch", "bar": 0, "holds": False})
    return listed


def write_json(
    path: Path, rows: Sequence[Row], tallies: Sequence[Tally], seconds: float, more: Sequence[Bar] = ()
) -> None:
    """Write the results, whole or not at all.

    Args:
        more: bars beside those of the rows.

    Raises:
        ReportError: naming the file and what kept it from being written.
    """
    details = [
        {
            "model_type": family.model_type,
            "layer": layer.name,
            "reference": layer.reference,
            "property": prop.name,
            "scenarios": tally.scenarios,
            "cases": tally.cases,
            "seconds": tally.seconds,
            "unjudged": tally.unjudged,
            "choices": tally.choices,
            "near_ties": tally.near_ties,
            "worst": {
                verdict: {"quantity": str(j.quantity), "dtype": j.dtype, "error": j.error, "allowed": j.allowed}
                for verdict, j in tally.worst.items()
            },
            "result": result(tally),
            "gaps": [
                {"name": name, "sentence": known.gap.sentence, "versions": list(known.gap.versions)}
                | {"scenario": str(known.smallest), "mismatch": str(known)}
                for name, known in tally.gaps.items()
            ],
            "mismatch": None if tally.mismatch is None else str(tally.mismatch),
            "scenario": None if tally.mismatch is None else str(tally.mismatch.smallest),
        }
        for (family, layer, prop), tally in zip(rows, tallies, strict=True)
    ]
    report = {
        "reference": reference.version(),
        "torch": torch.__version__,
        "seconds": seconds,
        "bars": [*bars(rows, tallies), *more],
        "rows": details,
    }
    write_atomically(path, as_json(report))


def as_json(report: Any) -> str:
    """JSON, in which a number that is infinite or none at all is null."""
    return json.dumps(_finite(report), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


DEVICES = ("/dev/", "/proc/")


def check_place(path: Path) -> None:
    """Refuse, before any work is done, a place where no report can be written.

    Raises:
        ReportError: naming the place.
    """
    if path.is_dir():
        raise ReportError(f"{path}: the report cannot be written over a directory; name a file with --json")
    if not path.parent.is_dir():
        raise ReportError(f"{path}: the report cannot be written, as {path.parent} is no directory; create it")


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that a full disk leaves what was there before.

    A link stays one: what it points to is replaced. A pipe or a device takes the text itself.

    Raises:
        ReportError: naming the file and what kept it from being written.
    """
    check_place(path)
    temporary = None
    try:
        if str(path.absolute()).startswith(DEVICES) or (path.exists() and not path.is_file()):
            with path.open("a", encoding="utf-8") as device:
                device.write(text + "\n")
            return
        target = path.resolve()
        with NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False, encoding="utf-8") as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(target.stat().st_mode if target.exists() else _usual_mode())
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ReportError(
            f"{path}: the report cannot be written ({error.strerror}); free some space or name another file with --json"
        ) from error


def _usual_mode() -> int:
    """The mode that a new file of this process gets; a temporary one is only for its owner."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
