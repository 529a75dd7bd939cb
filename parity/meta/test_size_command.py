"""`parity size` prints what is counted, holds it on demand, and names the file and the field that it cannot read."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parity import cli, sizes

FIXTURES = Path(__file__).parents[2] / "fixtures"


def ended(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of `parity size`."""
    monkeypatch.setattr(sys, "argv", ["parity", "size", *words])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def config(tmp_path: Path, **changes: object) -> Path:
    """Llama's configuration with some fields changed, those that are None left out."""
    fields = json.loads((FIXTURES / "llama" / "config.json").read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return tmp_path / "config.json"


def test_deepseeks_latents_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, "deepseek-v3") == 0
    printed = capsys.readouterr().out
    assert "671,026,404,352" in printed
    assert "576 numbers, of 40,960" in printed


@pytest.mark.parametrize("name", ["config.json", ""], ids=["file", "directory"])
def test_a_configuration_of_ones_own_is_held_against_the_reference(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    assert ended(monkeypatch, "--config", str(FIXTURES / "mixtral" / name), "--verify", "--json", str(report)) == 0
    assert "all 2 numbers are those of the reference" in capsys.readouterr().out
    bars = json.loads(report.read_text(encoding="utf-8"))["bars"]
    assert [bar["value"] == bar["bar"] and bar["holds"] for bar in bars] == [True, True]


def test_what_is_not_the_references_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    count = sizes.size

    def without_norms(config: object) -> object:
        whole = count(config)  # type: ignore[arg-type]
        return replace(whole, parts=tuple(part for part in whole.parts if part.name != "norms"))

    monkeypatch.setattr(sizes, "size", without_norms)
    report = tmp_path / "report.json"
    assert ended(monkeypatch, "--config", str(FIXTURES / "llama"), "--verify", "--json", str(report)) == 1
    assert "parameters differ" in capsys.readouterr().out
    assert [bar["holds"] for bar in json.loads(report.read_text(encoding="utf-8"))["bars"]] == [False, True]


BAD: dict[str, tuple[dict[str, object], Sequence[str]]] = {
    "a field that does not divide": ({"num_key_value_heads": 5}, ["num_key_value_heads is 5"]),
    "no size": ({"hidden_size": "wide"}, ["hidden_size"]),
    "no model type": ({"model_type": None}, ["model_type is missing"]),
}


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD)
def test_a_bad_configuration_is_refused_with_its_file_and_field(
    changes: dict[str, object],
    said: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = config(tmp_path, **changes)
    assert ended(monkeypatch, "--config", str(path)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(words in error for words in (f"parity: {path}: ", *said))


def test_an_unknown_model_and_two_models_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "gpt3") == 2
    assert "unknown model 'gpt3'" in capsys.readouterr().err
    assert ended(monkeypatch, "gpt2", "--config", str(FIXTURES / "llama")) == 2
