"""The bench times, counts and judges what it says."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from parity.bench import __main__ as command
from parity.bench import layers
from parity.bench.bars import Bar
from parity.bench.contest import Contestant, contest, ratios
from parity.bench.memory import extra_memory
from parity.family import FamilyError, Kind
from parity.scenario import ScenarioError


def test_a_contest_tells_how_many_times_as_long_the_others_take() -> None:
    x = torch.randn(300, 300)

    def multiply(times: int) -> Contestant:
        return Contestant(str(times), lambda: lambda: [x @ x for _ in range(times)])

    seconds = contest([multiply(2), multiply(6)], repeats=15)
    assert ratios(seconds, "2") == {"6": pytest.approx(3, rel=0.5)}


def test_extra_memory_counts_what_is_held_at_a_time() -> None:
    x = torch.zeros(1 << 16)

    def step() -> torch.Tensor:
        y = x + 1
        y = y + 1  # the first sum is held until the second is there
        return y + 1

    assert extra_memory(step) == pytest.approx(2 * x.nbytes, rel=1e-3)


@pytest.mark.parametrize("model", ["llama", "deepseek_v3", "bert"])
def test_every_layer_below_the_whole_models_has_rows(model: str) -> None:
    rows = layers.rows([model], [], ["f32"])
    assert {row.layer for row in rows} == {layer for layer in rows[0].family.layers if layer.kind is not Kind.MODEL}


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(FamilyError, match="no family has a layer 'attentoin'"):
        layers.rows([], ["attentoin"], ["f32"])


def test_a_dtype_without_measures_is_refused() -> None:
    with pytest.raises(ScenarioError, match="not in float64"):
        layers.rows(["llama"], ["norm"], ["float32", "float64"])


def result(ratio: float) -> layers.Result:
    return layers.Result(layers.rows(["llama"], ["norm"], ["f32"])[0], 1.0, {"eager": 2.0, "sdpa": ratio}, 1.0)


def test_the_faster_reference_counts() -> None:
    assert result(0.96).fast
    assert not result(0.94).fast


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (0.5, 1)])
def test_a_bar_that_does_not_hold_shows_in_the_exit_code_and_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float, code: int
) -> None:
    monkeypatch.setattr(command, "settled", lambda: None)
    monkeypatch.setattr(layers, "measure", lambda rows, quick: [result(ratio)])
    app = typer.Typer()
    app.command()(command.bench)
    ran = CliRunner().invoke(app, ["layers", "--json", str(tmp_path / "bench.json")])
    assert ran.exit_code == code
    bars = json.loads((tmp_path / "bench.json").read_text("utf-8"))["bars"]
    assert [bar["holds"] for bar in bars] == [ratio == 1.0, True]


def test_a_number_without_a_bar_holds() -> None:
    assert Bar("told only", 7.0, "s").holds
