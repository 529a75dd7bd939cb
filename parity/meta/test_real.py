"""The proof on real input can fail: on tiny stand-ins it holds, and breaks where rows or vectors are made otherwise."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from parity import reference
from parity.checkpoint import Results
from parity.compare import Record
from parity.real import minilm, proof
from parity.real.packages import weights_file
from parity.real.smollm2 import PARTS, ROTATED, Stored, name_on_disk
from parity.tiny import initialise, sizes
from parity.tiny.checkpoint import checkpoint
from reimpl.bert import BertConfig, BertModel
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

    monkeypatch.setattr(proof, "weights_file", lambda package, suffix: LLAMA / f"tiny{suffix}")
    monkeypatch.setattr(minilm, "hold", lambda results, directory, console: [])
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
    parts = (f"blk.0.{part}" if part.startswith(("attn", "ffn")) else part for part in PARTS)
    assert {name_on_disk(f"{part}.weight") for part in parts} == tensors.keys()


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(CheckpointError, match="no-such-package is missing, install it with `make real`"):
        weights_file("no-such-package", ".gguf")


class Words:
    """A tokenizer that splits at spaces and pads at the right."""

    def __call__(self, texts: list[str], padding: bool, return_tensors: str) -> dict[str, Tensor]:
        rows = [torch.tensor([len(word) for word in text.split()]) for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def hold_sentences(
    monkeypatch: pytest.MonkeyPatch, directory: Path, dtypes: tuple[str, ...] = ("f64",)
) -> tuple[int, str]:
    """The run of the second model, on a tiny BERT without a head."""
    fields = sizes.config("bert")
    shapes = {name: tuple(value.shape) for name, value in BertModel(BertConfig.from_dict(fields)).state_dict().items()}
    save_file(initialise.fill(initialise.plan(shapes, "bert"), 0), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"architectures": ["BertModel"], **fields}))
    monkeypatch.setattr(reference, "tokenizer", lambda directory: Words())
    printed = io.StringIO()
    console = Console(file=printed, width=200, soft_wrap=True)
    results = Results(minilm.trained(directory, dtypes), str)
    controls = minilm.hold(results, directory, console)
    code = results.conclude(directory / "report.json", console, controls)
    return code, printed.getvalue()


@pytest.mark.parity
def test_sentences_have_the_same_vectors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, printed = hold_sentences(monkeypatch, tmp_path, ("f64", "bf16"))
    assert code == 0, printed
    assert "all 10 rows hold" in printed
    assert "control holds" in printed
    bars = {bar["name"]: bar["holds"] for bar in json.loads((tmp_path / "report.json").read_text())["bars"]}
    wanted = {f"bert/{layer}/forward f64/output" for layer in ("embeddings", "attention", "block", "model")}
    assert bars.keys() >= {*wanted, "bert/model/sentences f64/output", "bert/model/sentences bf16/output"}


@pytest.mark.parity
def test_vectors_that_count_padding_as_words_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted, sides = minilm.vectors, list[Record]()

    def careless(case: Any, record: Record) -> Record:
        sides.append(record)
        return counted(case.varied(valid=None) if len(sides) == 2 else case, record)  # ours is the second

    monkeypatch.setattr(minilm, "vectors", careless)
    code, printed = hold_sentences(monkeypatch, tmp_path)
    assert code == 1
    assert "bert model       sentences f64  FAILS" in printed, printed
    assert "1 of 5 rows FAIL" in printed
