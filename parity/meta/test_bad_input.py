"""Bad input ends the command line with one paragraph on standard error and exit code 2."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parity import cli

LLAMA = Path(__file__).parents[2] / "fixtures" / "llama"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def edit(**changes: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        fields = json.loads((directory / CONFIG).read_text())
        kept = {name: value for name, value in (fields | changes).items() if value is not None}
        (directory / CONFIG).write_text(json.dumps(kept))

    return damage


def truncate(directory: Path) -> None:
    whole = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(whole[: len(whole) // 2])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such directory": (shutil.rmtree, "does not exist"),
    "no config.json": (lambda directory: (directory / CONFIG).unlink(), "holds no config.json"),
    "broken JSON": (lambda directory: (directory / CONFIG).write_text("{"), "no valid JSON"),
    "no model type": (edit(model_type=None), "model_type is missing"),
    "unknown model type": (edit(model_type="lama"), "unknown model type 'lama'; did you mean 'llama'? known are"),
    "heads that do not divide": (edit(num_key_value_heads=4), "num_key_value_heads is 4"),
    "unknown rope type": (edit(rope_parameters={"rope_type": "yarm"}, rope_scaling=None), "did you mean 'yarn'?"),
    "truncated weights": (truncate, "truncated or damaged"),
    "no weights": (lambda directory: (directory / WEIGHTS).unlink(), "holds neither"),
}


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The paragraph with which the command line refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["parity", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    paragraph = capsys.readouterr().err
    assert paragraph.startswith("parity: ")
    assert paragraph.count("\n") == 1
    return paragraph


@pytest.mark.parametrize(("damage", "said"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_refused(
    damage: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(LLAMA, directory)
    damage(directory)
    assert said in refused(monkeypatch, capsys, "run", "--checkpoint", str(directory))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scenario", "h4/4 s3"), "leave heads out"),
        (("--scenario", "s3 nonsense"), "nonsense"),
        (("--dtype", "float8"), "unknown dtype 'float8'"),
        (("--dtype", "float64", "--json", "/no/such/directory/report.json"), "the report cannot be written"),
    ],
)
def test_bad_options_are_refused(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(monkeypatch, capsys, "run", "--checkpoint", str(LLAMA), *words)


def test_what_a_checkpoint_has_no_use_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parity", "run", "llama", "--checkpoint", str(LLAMA), "--layer", "mlp"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "MODEL, --layer cannot be given with --checkpoint" in " ".join(capsys.readouterr().err.split())


def test_the_shell_sees_the_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from parity.cli import main; main()", "run", "--checkpoint", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert not ended.stdout
