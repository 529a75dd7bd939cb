"""`make bench`: print every measure beside its bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from parity.bench import processor, settled
from parity.cli import console
from parity.errors import BAD_INPUT
from parity.table import as_json, write_atomically


def bench(
    model: Annotated[str, typer.Argument(help="the family whose run is measured")] = "llama",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the bars here as JSON")] = None,
) -> None:
    """Measure the harness over a family and hold it against its bars."""
    settled()
    torch.set_num_threads(1)
    from parity.bench import harness

    screen = console()
    screen.print(f"{processor()}, torch {torch.__version__}, one thread", highlight=False)
    bars = harness.measure(model)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("measure", "value", "unit", "bar", "holds"):
        table.add_column(name, no_wrap=True)
    for bar in bars:
        table.add_row(bar.name, f"{bar.value:.4g}", bar.unit, bar.limit, bar.mark)
    screen.print(table)
    if json_file is not None:
        write_atomically(
            json_file, json.dumps({"processor": processor(), "bars": [bar.record() for bar in bars]}, indent=1)
        )
    raise typer.Exit(0 if all(bar.holds for bar in bars) else 1)


if __name__ == "__main__":
    try:
        typer.run(bench)
    except BAD_INPUT as error:
        raise SystemExit(f"parity.bench: {error}") from error
