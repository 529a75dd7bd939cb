"""Imports point one way, as the contracts in pyproject.toml say, and the contracts would notice if they did not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BREACHES = {
    "reimpl imports the reference": ("reimpl/norm.py", "import transformers", "reimpl is a clean room"),
    "reimpl imports parity": ("reimpl/norm.py", "import parity.scenario", "reimpl is a clean room"),
    "a tiny checkpoint imports reimpl": (
        "parity/tiny/draw.py",
        "import reimpl.norm",
        "tiny checkpoints know no reimpl",
    ),
    "a stranger calls the reference": (
        "parity/scenario.py",
        "import transformers",
        "only reference.py calls transformers",
    ),
    "a lower module imports an upper": ("parity/scenario.py", "import parity.compare", "parity imports downward"),
}


def checked(root: Path) -> subprocess.CompletedProcess[str]:
    """What `lint-imports` says about the tree at `root`."""
    command = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=root, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("reimpl", "parity"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_are_kept() -> None:
    result = checked(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("file", "line", "contract"), BREACHES.values(), ids=BREACHES)
def test_a_breach_is_noticed(copy: Path, file: str, line: str, contract: str) -> None:
    path = copy / file
    path.write_text(f"{path.read_text('utf-8')}\n{line}\n", "utf-8")
    result = checked(copy)
    assert result.returncode == 1
    assert f"{contract} BROKEN" in result.stdout
