"""The tiny checkpoints are rebuilt bit for bit, are loud, and are read by the reference in every layout."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from parity.tiny import draw, sizes
from parity.tiny import write as writing
from parity.tiny.checkpoint import checkpoint
from parity.tiny.write import RopeKeys, spelled, write

BERTS_HEAD = "cls.predictions.decoder"
FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL_TYPES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
SHARD = 20_000
"""Bytes; a tiny checkpoint has about 50,000."""
ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 32, "mscale": 1.5},
    "llama3": sizes.OTHERS["rope_parameters"],
}

of_each_fixture = pytest.mark.parametrize("model_type", MODEL_TYPES)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def load(directory: Path) -> Any:
    """The reference's own reading of a checkpoint, which must have no complaint."""
    (architecture,) = transformers.AutoConfig.from_pretrained(directory).architectures
    model, said = getattr(transformers, architecture).from_pretrained(directory, output_loading_info=True)
    complaints = {kind: found for kind, found in said.items() if found}
    assert not complaints
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(draw.tokens((2, 40), sizes.SIZES["vocab_size"], 0, "ids")).logits


def frequencies(model_type: str, directory: Path) -> Tensor:
    config = transformers.AutoConfig.from_pretrained(directory)
    assert config.model_type == model_type
    return transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq


def test_there_is_a_fixture() -> None:
    assert "llama" in MODEL_TYPES


class TestRebuilding:
    @of_each_fixture
    def test_gives_the_committed_files_bit_for_bit(self, model_type: str, tmp_path: Path) -> None:
        write(tmp_path, *checkpoint(model_type))
        rebuilt, committed = contents(tmp_path), contents(FIXTURES / model_type)
        assert {name: committed[name] for name in rebuilt} == rebuilt

    @of_each_fixture
    def test_keeps_them_small(self, model_type: str) -> None:
        assert sum(map(len, contents(FIXTURES / model_type).values())) < 1_000_000

    def test_leaves_no_file_of_another_layout_and_keeps_what_is_not_its_own(self, tmp_path: Path) -> None:
        write(tmp_path, *checkpoint("llama"), shard_bytes=SHARD)
        (tmp_path / "recorded.json").write_text("{}")
        write(tmp_path, *checkpoint("llama"))
        assert set(contents(tmp_path)) == {"config.json", "model.safetensors", "recorded.json"}

    def test_that_fails_while_writing_changes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, *checkpoint("llama"))
        before = contents(tmp_path)

        def full(*_: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(writing, "write_json", full)
        with pytest.raises(OSError, match="no space left"):
            write(tmp_path, *checkpoint("llama", seed=1))
        assert contents(tmp_path) == before

    def test_that_fails_while_moving_leaves_no_mixture(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, *checkpoint("llama"))

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, *checkpoint("llama", seed=1))
        assert "config.json" not in contents(tmp_path)


class TestLoudness:
    @of_each_fixture
    def test_no_two_axes_share_a_size(self, model_type: str) -> None:
        config = sizes.config(model_type)
        axes = {name: config[name] for name in sizes.SIZES if name in config}
        if "kv_lora_rank" in axes:
            del axes["num_key_value_heads"]  # no axis of its own: every head makes its keys from the latents
            axes["query rows"] = config["num_attention_heads"] * (axes["qk_nope_head_dim"] + axes["qk_rope_head_dim"])
            axes["latent rows"] = axes["kv_lora_rank"] + axes["qk_rope_head_dim"]
            axes["shared rows"] = config["n_shared_experts"] * axes["moe_intermediate_size"]
        elif "head_dim" in axes:
            axes["query rows"] = config["num_attention_heads"] * config["head_dim"]
            axes["key rows"] = config["num_key_value_heads"] * config["head_dim"]
        equal = [pair for pair in itertools.combinations(axes, 2) if axes[pair[0]] == axes[pair[1]]]
        assert not equal

    @of_each_fixture
    def test_no_parameter_is_constant_and_no_two_are_equal(self, model_type: str) -> None:
        tensors = load_file(FIXTURES / model_type / "model.safetensors")
        assert not [name for name, tensor in tensors.items() if tensor.unique().numel() < tensor.numel() ** 0.5]
        assert not [(a, b) for a, b in itertools.combinations(tensors, 2) if torch.equal(tensors[a], tensors[b])]

    @of_each_fixture
    def test_every_value_is_one_of_bfloat16(self, model_type: str) -> None:
        _, tensors = checkpoint(model_type)
        stored = load_file(FIXTURES / model_type / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in stored.items()} == dict.fromkeys(tensors, torch.bfloat16)
        assert all(torch.equal(tensor, stored[name].float()) for name, tensor in tensors.items())

    @of_each_fixture
    def test_every_field_that_is_no_size_differs_from_its_default(self, model_type: str) -> None:
        default = transformers.AutoConfig.for_model(model_type).to_dict()
        coincide = {"tie_word_embeddings", "bos_token_id", "eos_token_id"}
        config = sizes.config(model_type)
        assert not [name for name in sizes.OTHERS.keys() - coincide if name in config and config[name] == default[name]]


class TestReading:
    """transformers reads every layout without a complaint."""

    @pytest.mark.parametrize("rope_keys", ["v4", "v5", "both"])
    @pytest.mark.parametrize("shard_bytes", [None, SHARD])
    @pytest.mark.parametrize("tied", [False, True])
    @of_each_fixture
    def test_gives_the_same_logits_in_every_layout(
        self, model_type: str, tied: bool, shard_bytes: int | None, rope_keys: RopeKeys, tmp_path: Path
    ) -> None:
        config, tensors = checkpoint(model_type, tie_word_embeddings=tied)
        write(tmp_path / "plain", config, tensors)
        write(tmp_path / "other", config, tensors, shard_bytes=shard_bytes, rope_keys=rope_keys)
        assert (tmp_path / "other" / "model.safetensors.index.json").exists() == (shard_bytes is not None)
        assert torch.equal(logits(load(tmp_path / "plain")), logits(load(tmp_path / "other")))

    @of_each_fixture
    def test_finds_the_same_tensors_in_shards(self, model_type: str, tmp_path: Path) -> None:
        write(tmp_path, *checkpoint(model_type), shard_bytes=SHARD)
        sharded: dict[str, Tensor] = {}
        for file in sorted(tmp_path.glob("*.safetensors")):
            assert file.stat().st_size < SHARD + 2_000  # the header
            sharded |= load_file(file)
        single = load_file(FIXTURES / model_type / "model.safetensors")
        assert sharded.keys() == single.keys()
        assert all(torch.equal(sharded[name], single[name]) for name in single)

    @of_each_fixture
    def test_a_tied_checkpoint_has_no_head_of_its_own(self, model_type: str) -> None:
        _, untied = checkpoint(model_type)
        _, tied = checkpoint(model_type, tie_word_embeddings=True)
        assert {name.rpartition(".")[0] for name in untied.keys() - tied.keys()} in ({"lm_head"}, {BERTS_HEAD})
        assert tied.keys() <= untied.keys()

    @pytest.mark.parametrize("rope_type", ROPES)
    def test_both_spellings_of_rope_give_the_same_frequencies(self, rope_type: str, tmp_path: Path) -> None:
        rope = {**ROPES[rope_type], "rope_type": rope_type, "rope_theta": 500.0}
        config, tensors = checkpoint("llama", rope_parameters=rope)
        spellings: tuple[RopeKeys, ...] = ("v4", "v5", "both")
        for keys in spellings:
            write(tmp_path / keys, config, tensors, rope_keys=keys)
        old, new, both = (frequencies("llama", tmp_path / keys) for keys in spellings)
        assert torch.equal(old, new)
        assert torch.equal(old, both)
        write(tmp_path / "unset", {**config, "rope_parameters": None}, tensors)
        assert not torch.equal(new, frequencies("llama", tmp_path / "unset"))

    def test_version_4_spells_rope_without_the_new_key(self) -> None:
        rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0, "partial_rotary_factor": 0.5}
        assert spelled({"rope_parameters": rope}, "v4") == {
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        }
