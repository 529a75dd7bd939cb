"""`make bench`: print every measure beside its bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from parity.bench import processor, settled
from parity.bench.bars import Bar
from parity.cli import console
from parity.errors import BAD_INPUT
from parity.table import as_json, write_atomically

if TYPE_CHECKING:
    from parity.bench.layers import Result


class Part(StrEnum):
    """What can be measured."""

    ALL = "all"
    HARNESS = "harness"
    LAYERS = "layers"


def bench(
    part: Annotated[Part, typer.Argument(help="the speed of the harness, of our layers, or both")] = Part.ALL,
    model: Annotated[
        list[str] | None, typer.Option(help="only this family (repeat); for the harness, else llama")
    ] = None,
    layer: Annotated[list[str] | None, typer.Option(help="of our layers only this one (repeat)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="of our layers only in float32, or in bfloat16")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="our layers roughly: fewer repeats, no long prefill")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the bars here as JSON")] = None,
) -> None:
    """Measure the harness, and our layers beside the reference's, and hold them against their bars."""
    settled()
    torch.set_num_threads(1)
    screen = console()
    screen.print(f"{processor()}, torch {torch.__version__}, one thread", highlight=False)
    bars = [] if part is Part.LAYERS else _harness(screen, model or ["llama"])
    results = [] if part is Part.HARNESS else list(_layers(screen, model or [], layer or [], dtype or [], quick))
    bars += [bar for result in results for bar in result.bars()]
    failing = [bar for bar in bars if not bar.holds]
    _print_bars(screen, failing)
    screen.print(f"{len(failing)} of {len(bars)} bars FAIL" if failing else f"all {len(bars)} bars hold")
    if json_file is not None:
        report = {
            "processor": processor(),
            "torch": torch.__version__,
            "bars": [bar.record() for bar in bars],
            "rows": [result.record() for result in results],
        }
        write_atomically(json_file, as_json(report))
    raise typer.Exit(1 if failing else 0)


def _harness(screen: Console, models: list[str]) -> list[Bar]:
    from parity.bench import harness

    bars = [bar for model in models for bar in harness.measure(model)]
    _print_bars(screen, bars)
    return bars


def _layers(screen: Console, models: list[str], layers: list[str], dtypes: list[str], quick: bool) -> Iterator[Result]:
    """Print a line as soon as it is measured, since all of them take long."""
    from parity.bench import layers as contests

    rows = contests.rows(models, layers, dtypes, quick)
    screen.print(contests.HEADER, highlight=False)
    for number, result in enumerate(contests.measure(rows, quick), 1):
        screen.print(f"{number:3}/{len(rows)}  {result.line}", highlight=False)
        yield result


def _print_bars(screen: Console, bars: list[Bar]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("measure", "value", "unit", "bar", "holds"):
        table.add_column(name, no_wrap=True)
    for bar in bars:
        table.add_row(bar.name, f"{bar.value:.4g}", bar.unit, bar.limit, bar.mark)
    if bars:
        screen.print(table)


if __name__ == "__main__":
    try:
        typer.run(bench)
    except BAD_INPUT as error:
        sys.stderr.write(f"parity.bench: {error}\n")
        sys.exit(2)
