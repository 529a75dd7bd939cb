"""What a check found, as plain data: rows of verdicts, mismatches, notes; ready to be written as JSON."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from parity import reference
from parity.compare import VERDICTS, Judgement
from parity.mismatch import NAMES

SENTENCES = {
    "forward": "computes what the reference computes",
    "gradients": "has the reference's gradients",
    "swap logits": "gives the whole model's logits, with and without a cache",
    "swap greedy": "leads to the same greedy text",
    "swap beams": "leads to the same beams",
    "swap training": "leads to the same loss, gradients and weights after a step",
    "swap saving": "is saved and loaded without a change",
}
"""What holds, by property; those of a live model begin with `swap`."""


@dataclass(frozen=True)
class Where:
    """A call: of which configuration (its number and what is special about it), scenario, and which of its calls."""

    number: int
    point: str
    scenario: str
    call: int


@dataclass
class Failure:
    """One call that does not hold: what was judged, or why it could not be."""

    where: Where
    judgements: list[Judgement]
    said: str | None = None

    @property
    def failed(self) -> list[Judgement]:
        return [judgement for judgement in self.judgements if not judgement.holds]

    @property
    def verdicts(self) -> list[str]:
        return list(dict.fromkeys(judgement.quantity.verdict for judgement in self.failed)) or ["output"]


@dataclass
class Row:
    """One property in one dtype.

    Attributes:
        cases: calls judged.
        worst: per verdict, the judgement nearest to its allowance.
        choices, near_ties: of experts, each for one token, and those that rounding decides.
        unjudged: quantities of which nothing could be said, since the reference itself was not finite.
        failures: every call that does not hold, simplest first.
    """

    prop: str
    dtype: str
    cases: int = 0
    seconds: float = 0.0
    unjudged: int = 0
    choices: int = 0
    near_ties: int = 0
    worst: dict[str, Judgement] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    ran: dict[str, None] = field(default_factory=dict)
    audited: set[Any] = field(default_factory=set)

    def add(self, where: Where, found: list[Judgement] | str) -> None:
        """Count a call that was judged, or that could not be, for the reason given."""
        self.cases += 1
        self.ran.setdefault(where.scenario)
        if isinstance(found, str):
            self.failures.append(Failure(where, [], found))
            return
        for judgement in found:
            verdict = judgement.quantity.verdict
            self.choices += judgement.choices
            self.near_ties += judgement.near_ties
            if not judgement.judged:
                self.unjudged += 1
            elif verdict not in self.worst or judgement.ratio > self.worst[verdict].ratio:
                self.worst[verdict] = judgement
        if not all(judgement.holds for judgement in found):
            self.failures.append(Failure(where, found))

    @property
    def result(self) -> str:
        return "fails" if self.failures else "holds" if self.cases else "not run"

    def cell(self, verdict: str) -> str:
        """What a table says of a verdict."""
        judgement = self.worst.get(verdict)
        failed = any(verdict in failure.verdicts for failure in self.failures)
        text = "" if judgement is None else _allowance(judgement)
        return f"FAILS {text}".strip() if failed else f"holds {text}" if judgement is not None else "-"


def _allowance(judgement: Judgement) -> str:
    if judgement.allowed == 0:
        return f"{judgement.error:g} of 0"
    return f"{judgement.error:.0e} of {judgement.allowed:.0e}"


Plain = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A whole check.

    Attributes:
        candidate, reference: what was held against what; `reference` is `model_type:Class`.
        versions: of what the numbers depend on, and the commit of the candidate's repository where it is in one.
        weights: how the reference's tensors became the candidate's, where by other than equal names, one line each.
        unsure: those lines for which something else would have fitted as well.
        notes: what is tolerated or left out.
        rows: see `plain_row`.
        mismatches: each with a headline and lines of label and text.
        rules: the weights' rules as a file.
        mistakes: those made in the layer from outside: what, in what, and by which scenarios they were caught.
        refused: why what holds proves nothing; None if it does.
    """

    candidate: str
    reference: str
    versions: dict[str, str]
    configurations: list[str]
    weights: list[str]
    unsure: list[str]
    notes: list[str]
    rows: list[Plain]
    mismatches: list[Plain]
    refused: str | None
    rules: str = ""
    mistakes: list[Plain] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.refused is None and all(row["result"] == "holds" for row in self.rows)

    def bars(self) -> list[Plain]:
        """One per row and verdict, in units of what is allowed, and one for a proof that is refused."""
        bars = []
        for row in self.rows:
            name = f"{row['property']}/{row['dtype']}"
            for verdict, worst_of in row["worst"].items():
                value = worst_of["ratio"]
                bars.append(_bar(f"{name}/{verdict}", value, "allowance", 1.0))
            if row["result"] == "not run" or (row["result"] == "fails" and all(b["holds"] for b in bars)):
                bars.append(_bar(name, 1, "mismatch", 0))
        return [*bars, *([_bar("proof", 1, "refused", 0)] if self.refused else [])]

    def plain(self) -> Plain:
        """All of it as JSON holds it."""
        return asdict(self) | {"holds": self.holds, "bars": self.bars()}


def _bar(name: str, value: float, unit: str, bar: float) -> Plain:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "holds": value <= bar}


def plain_row(row: Row) -> Plain:
    """A row as plain data."""
    return {
        "property": row.prop,
        "sentence": SENTENCES[row.prop],
        "dtype": NAMES[row.dtype],
        "result": row.result,
        "cases": row.cases,
        "seconds": row.seconds,
        "unjudged": row.unjudged,
        "choices": row.choices,
        "near_ties": row.near_ties,
        "scenarios": list(row.ran),
        "cells": {verdict: row.cell(verdict) for verdict in VERDICTS},
        "worst": {verdict: plain_judgement(judgement) for verdict, judgement in row.worst.items()},
        "failures": [
            asdict(failure.where) | {"said": failure.said, "judgements": [plain_judgement(j) for j in failure.failed]}
            for failure in row.failures
        ],
    }


def plain_judgement(judgement: Judgement) -> Plain:
    return {
        "quantity": str(judgement.quantity),
        "verdict": judgement.quantity.verdict,
        "dtype": NAMES[judgement.dtype],
        "error": judgement.error,
        "allowed": judgement.allowed,
        "rms": judgement.rms,
        "max": judgement.max,
        "ratio": judgement.ratio,
    }


def versions(place: Any) -> dict[str, str]:
    """What the numbers depend on."""
    found = {"reference": reference.version(), "torch": torch.__version__}
    file = Path(str(place).rpartition(":")[0])
    if file.is_file():
        command = ["git", "-C", str(file.resolve().parent), "describe", "--always", "--dirty"]
        try:
            described = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return found
        if described.returncode == 0:
            found["commit"] = described.stdout.strip()
    return found
