"""A soak counts what it judges, goes on where it was stopped, and tells of every alarm."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from parity.errors import ReportError
from parity.run import select
from parity.soak import BATCH, report, soak, tasks
from reimpl.llama import LlamaRMSNorm

NORM = select("llama", ["norm"], ["forward"], ["float32"])
BOTH = select("llama", ["norm", "mlp"], ["forward"], ["float32"])
SILENT = Console(quiet=True)


def test_batches_go_over_all_rows_until_there_are_so_many_scenarios() -> None:
    drawn = list(tasks(BOTH, 3 * BATCH + 7, seed=5))
    assert [(task.layer, task.seed, task.scenarios) for task in drawn] == [
        ("norm", 5, BATCH),
        ("mlp", 5, BATCH),
        ("norm", 6, BATCH),
        ("mlp", 6, 7),
    ]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "soak.jsonl"
    whole = soak(NORM, BATCH + 20, seed=0, workers=1, log=log, console=SILENT)
    assert [each.scenarios for each in whole] == [BATCH, 20]
    head, first, second = log.read_text().splitlines()
    log.write_text(f"{head}\n{first}\n{second[:30]}")  # as a full disk or a kill leaves it
    again = soak(NORM, BATCH + 20, seed=0, workers=1, log=log, console=SILENT)
    assert again[0] == whole[0]
    assert [(each.key, each.cases, each.failure) for each in again] == [(e.key, e.cases, e.failure) for e in whole]
    assert [bar["holds"] for bar in report(again, BATCH + 20, SILENT)] == [True, True]


def test_the_log_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "soak.jsonl"
    log.write_text(json.dumps({"scenarios": 1}) + "\n")
    with pytest.raises(ReportError, match="another run"):
        soak(NORM, BATCH, seed=0, workers=1, log=log, console=SILENT)
    assert json.loads(log.read_text()) == {"scenarios": 1}


def test_an_alarm_is_told(tmp_path: Path) -> None:
    with patch.object(LlamaRMSNorm, "forward", lambda self, x: x):  # the workers are forks, so they inherit it
        done = soak(NORM, 20, seed=0, workers=1, log=tmp_path / "soak.jsonl", console=SILENT)
    assert done[0].failure is not None
    assert "LlamaRMSNorm   output differs" in done[0].failure
    assert [bar["holds"] for bar in report(done, 20, SILENT)] == [False, False]
