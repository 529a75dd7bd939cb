"""`python -m parity.real`: hold trained models, ours and the reference's, against each other and print the table."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parity.cli import console, guard


def main(
    dtype: Annotated[list[str] | None, typer.Option(help="float64, float32, bfloat16 or float16 (repeat)")] = None,
    json: Annotated[Path | None, typer.Option(help="write the results here as JSON")] = None,
) -> None:
    """Hold trained models, SmolLM2-135M and all-MiniLM-L6-v2, against transformers and print a table of verdicts."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # of transformers' own bars, which it reads when it is imported
    from parity.real.proof import DTYPES, prove
    from parity.run import select

    raise typer.Exit(prove(select(None, [], [], dtype).dtypes if dtype else DTYPES, json, console()))


if __name__ == "__main__":
    guard(lambda: typer.run(main))
