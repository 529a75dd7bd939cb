"""Ordinary scenarios, none picked by hand, catch every mistake; `parity mistakes` tells it of all families."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parity import mistakes, proof
from parity.detection import WIDELY, detect
from parity.family import FamilyError
from parity.mistakes import Mistake
from parity.proof import RECORD, bars, prove, select
from parity.usual import CHECKS

PAIRING = "rotates adjacent pairs where the reference rotates halves"


@pytest.mark.parametrize("mistake", mistakes.catalogue(), ids=str)
def test_ordinary_scenarios_catch_it(mistake: Mistake) -> None:
    """In the first of its families; the command goes through all of them."""
    detection = detect(mistake, next(iter(mistake.where)), dtypes=(mistake.dtype,))
    assert detection.caught.keys() == {mistake.dtype}


def test_every_dtype_and_the_usual_checks_are_asked() -> None:
    detection = detect(mistakes.find(PAIRING), "llama")
    assert set(detection.caught) == {"f64", "f32", "bf16"}
    assert set(detection.usual) == set(CHECKS)
    assert all(bar["holds"] for bar in bars([detection]))


def test_a_mistake_that_nobody_makes_is_not_caught() -> None:
    detection = detect(replace(mistakes.find(PAIRING), exchange=nullcontext), "llama", examples=10)
    assert detection.caught == {}
    assert not all(bar["holds"] for bar in bars([detection]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "computes GELU by tanh for the exact one",
            r"stayed below .*, 0\.\d\d of it at most .*; in float64 it is worth",
        ),
        ("keeps the tables in bfloat16", "it changes not one number"),
    ],
)
def test_what_is_not_caught_in_bfloat16_has_a_measured_reason(name: str, why: str) -> None:
    detection = detect(mistakes.find(name), "llama", examples=20, dtypes=("f64", "bf16"))
    (reason,) = proof.summary([detection])["kinds"][detection.kind]["not caught"]
    assert re.search(why, reason)


def test_a_run_prints_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "mistakes.json"
    chosen = select("llama", [], [PAIRING])
    assert prove(chosen, 40, 0, 1, None, report, Console(width=200, soft_wrap=True)) == 0
    assert "1 mistakes of 1 kinds" in capsys.readouterr().out
    written: dict[str, Any] = json.loads(report.read_text())
    assert {bar["name"] for bar in written["bars"]} >= {"caught in float64", "caught in float32"}
    assert written["mistakes"][0]["mistake"] == PAIRING


def test_a_run_that_was_stopped_goes_on_and_keeps_the_other_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, kept = tmp_path / "mistakes.jsonl", tmp_path / "record.json"
    monkeypatch.setattr(proof, "RECORD", kept)
    kept.write_text(RECORD.read_text())
    quiet = Console(quiet=True)
    chosen = select("llama", [], [PAIRING, "rotates the wrong way"])
    first = proof.detect_all(chosen[:1], 20, 0, 1, quiet, log)
    monkeypatch.setattr(proof, "finished", lambda work, left, workers: [work(planted) for planted in left])
    monkeypatch.setattr(proof, "_detect", lambda examples, seed, planted: replace(first[0], mistake=planted[0]))
    prove(chosen, 20, 0, 1, log, None, quiet)
    assert [json.loads(line)["mistake"] for line in log.read_text().splitlines()[1:]] == [name for name, _ in chosen]
    before, after = json.loads(RECORD.read_text())["kinds"], json.loads(kept.read_text())["kinds"]
    assert after["rope pairing"]["made"] == len(chosen)
    assert {**after, "rope pairing": None} == {**before, "rope pairing": None}


@pytest.mark.parametrize(
    ("model", "kinds", "names", "said"),
    [
        ("lama", [], [], "did you mean 'llama'"),
        (None, ["rope pairings"], [], "did you mean 'rope pairing'"),
        (None, [], ["rotates the wrong ways"], "did you mean 'rotates the wrong way'"),
        ("gpt2", [], [PAIRING], "can be made there"),
    ],
)
def test_what_cannot_be_chosen_is_refused(model: str | None, kinds: list[str], names: list[str], said: str) -> None:
    with pytest.raises(FamilyError, match=said):
        select(model, kinds, names)


def test_the_record_in_the_readme_is_of_this_catalogue() -> None:
    """`make mistakes ARGS=--record` renews it; in float64 and float32 everything was caught when it was written."""
    record = json.loads(RECORD.read_text())
    listed = {
        kind: sorted(mistake.name for mistake in mistakes.catalogue() if mistake.kind == kind)
        for kind in mistakes.kinds()
    }
    assert {kind: each["mistakes"] for kind, each in record["kinds"].items()} == listed
    for each in record["kinds"].values():
        assert all(each["caught"][dtype][0] == each["caught"][dtype][1] for dtype in WIDELY)
