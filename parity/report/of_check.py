"""The page about a check of somebody's own layer, from its plain results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity.compare import VERDICTS
from parity.pictures import Picture
from parity.report.page import Page, Told

Plain = Mapping[str, Any]


def page_of_check(result: Plain, summary: str) -> Page:
    """What a check has shown; `result` is what `--json` writes."""
    return Page(
        title=f"{result['candidate']} against {result['reference']}",
        versions=", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        holds=result["holds"],
        summary=summary,
        rows=[_row(row) for row in result["rows"]],
        mismatches=[_told(mismatch) for mismatch in result["mismatches"]],
        notes=[*([f"refused as proof: {result['refused']}"] if result["refused"] else []), *result["notes"]],
    )


def _row(row: Plain) -> dict[str, Any]:
    cells = {verdict: cell for verdict in VERDICTS if (cell := _cell(row["cells"].get(verdict, "-"))) is not None}
    return {"name": row["dtype"], "property": row["property"], "cells": cells, "cases": f"{row['cases']:,}"}


def _cell(text: str) -> dict[str, str] | None:
    """A cell of the table, which says first what came out."""
    result, _, rest = text.partition(" ")
    return None if text == "-" else {"result": result.lower(), "text": rest}


def _told(mismatch: Plain) -> Told:
    pictures = [Picture(**{**each, "names": tuple(each["names"])}) for each in mismatch.get("pictures", ())]
    return Told(
        mismatch["headline"],
        [(label, text) for label, text in mismatch["lines"]],
        pictures,
        [(name, distance) for name, distance in mismatch.get("course", ())],
        mismatch.get("first"),
    )
