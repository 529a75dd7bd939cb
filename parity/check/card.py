"""`parity card`: what a check found, as Markdown to paste into a pull request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parity.check.command import mismatch_text
from parity.compare import VERDICTS
from parity.errors import InputError


def card(report: dict[str, Any]) -> str:
    """The card of a report as `--json` writes it; text from outside stands in code, where Markdown leaves it alone."""
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items())
    shown = [v for v in VERDICTS if any(row["cells"].get(v, "-") != "-" for row in report["rows"])]
    lines = [
        f"### {_code(report['candidate'])} against {_code(report['reference'])}: {_outcome(report)}",
        "",
        f"{versions}; {len(report['configurations'])} configurations; an error beside what was allowed, both relative",
        "",
        f"| property | dtype | {' | '.join(shown)} | calls |",
        f"|---|---|{'---|' * len(shown)}---|",
    ]
    for row in report["rows"]:
        cells = " | ".join(row["cells"].get(verdict, "-") for verdict in shown)
        lines.append(f"| {row['property']} | {row['dtype']} | {cells} | {row['cases']} |")
    lines += ["", "Scenarios: " + ", ".join(dict.fromkeys(name for row in report["rows"] for name in row["scenarios"]))]
    if report.get("mistakes"):
        caught = [mistake for mistake in report["mistakes"] if mistake["caught"]]
        lines.append(f"Mistakes injected into this layer: {len(caught)} of {len(report['mistakes'])} caught.")
    lines += [f"* weights: {_code(rule)}" for rule in report["weights"]]
    lines += [f"* {_code(note)}" for note in report["notes"]]
    for mismatch in report["mismatches"]:
        lines += ["", "```", mismatch_text(mismatch).replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39)).replace(chr(10), ' ')}`"


def _outcome(report: dict[str, Any]) -> str:
    if report["refused"]:
        return "refused as proof"
    return "holds" if report["holds"] else "FAILS"


def read(path: Path) -> dict[str, Any]:
    """A report that `parity check --json` wrote.

    Raises:
        InputError: if it is none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        card(report)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is no report of `parity check --json`") from error
    return report
