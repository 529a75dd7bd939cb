"""Several processes show what a single one does."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import reimpl.attention
from parity.run import Reports, run, select
from parity.workers import finished
from reimpl.rope import rotate


def rows(path: Path, workers: int) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, what was printed but for times, and the rows of a run of two properties."""
    console = Console(file=path.with_suffix(".txt").open("w"), width=300)
    code = run(select("qwen2", ["attention"], ["rows", "reuse"], []), 4, 0, Reports(json=path), console, workers)
    console.file.close()
    printed = path.with_suffix(".txt").read_text(encoding="utf-8").partition("from transformers")[2]
    return code, printed, json.loads(path.read_text(encoding="utf-8"))["rows"]


def test_processes_find_what_a_single_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit what was planted, and a mismatch comes back whole: its place, its cause, its smallest scenario."""
    monkeypatch.setattr(reimpl.attention, "rotate", lambda x, cos, sin, pairing: rotate(x, -cos, sin, pairing))
    alone, several = (rows(tmp_path / f"{workers}.json", workers) for workers in (1, 2))
    assert alone[0] == several[0] == 1
    assert alone[1] == several[1] != ""
    for one, other in zip(alone[2], several[2], strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_whoever_stops_waits_for_none() -> None:
    """As on Ctrl-C, and without a process left behind."""
    start, results = time.monotonic(), finished(nap, [0.0, 600.0, 600.0], workers=2)
    assert next(results) == 0.0
    results.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 60
    assert not multiprocessing.active_children()
