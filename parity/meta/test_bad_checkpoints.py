"""A checkpoint that is wrong in any way ends in one paragraph that says where, what, and what to do."""

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from parity.tiny.checkpoint import checkpoint
from parity.tiny.write import write
from reimpl.checkpoint import CheckpointError
from reimpl.config import ConfigError
from reimpl.llama import LlamaForCausalLM

REMEDY = re.compile(r"correct|download|remove|add|convert|take|check|write|a checkpoint is a directory")
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TENSOR = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def built() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def pristine(built: tuple[dict[str, Any], dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint in one file and one in shards. Tests damage copies."""
    root = tmp_path_factory.mktemp("pristine")
    write(root / "single", *built)
    write(root / "sharded", *built, shard_bytes=8000)
    return root


@contextmanager
def refusal(*mentions: str) -> Iterator[None]:
    """The block raises an error of ours, one paragraph that mentions these and a remedy."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert REMEDY.search(message), message
    for mention in mentions:
        assert mention in message, message


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def replace(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def with_header(directory: Path, header: bytes) -> None:
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)


def pickled_only(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    # Nobody may open this: it is no pickle, and a reader that tried would say so.
    (directory / "pytorch_model.bin").write_bytes(b"never opened")


def to_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("")


def to_empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


Damage = Callable[[Path], object]
FILES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no such directory": (lambda d: d.rename(d.with_name("gone")), ("does not exist",)),
    "a file for a directory": (to_file, ("is a file",)),
    "no config": (lambda d: (d / CONFIG).unlink(), (f"holds no {CONFIG}", WEIGHTS)),
    "an empty directory": (to_empty, (f"holds no {CONFIG}", "it is empty")),
    "broken JSON": (lambda d: (d / CONFIG).write_text('{"vocab_size": 61,'), (CONFIG, "no valid JSON", "line 1")),
    "JSON in another encoding": (lambda d: (d / CONFIG).write_bytes(b'{"a": "\xff\xfe"}'), (CONFIG, "no valid JSON")),
    "JSON too deep": (lambda d: (d / CONFIG).write_text("[" * 100_000), (CONFIG, "no valid JSON")),
    "a list for an object": (lambda d: (d / CONFIG).write_text("[1]"), (CONFIG, "holds list")),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), (f"neither {WEIGHTS} nor {INDEX}", CONFIG)),
    "pickled weights only": (pickled_only, ("pytorch_model.bin", "not opened", "runs code", "convert")),
    "an empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), (WEIGHTS, "truncated or damaged")),
    "a header longer than the file": (lambda d: (d / WEIGHTS).write_bytes(b"\xff" * 64), (WEIGHTS, "damaged")),
    "a header that is no JSON": (lambda d: with_header(d, b"{" * 8), (WEIGHTS, "truncated or damaged")),
    "a header without a shape": (lambda d: with_header(d, b'{"a":{"dtype":"F32"}}   '), (WEIGHTS, "damaged")),
    "a dtype that nobody knows": (
        lambda d: with_header(d, b'{"a":{"dtype":"F7","shape":[],"data_offsets":[0,0]}}'),
        (WEIGHTS, "damaged"),
    ),
    "a tensor missing": (lambda d: replace(d, lambda t: t.pop(TENSOR)), (TENSOR, "is missing")),
    "a tensor left over": (lambda d: replace(d, lambda t: t.update(extra=torch.ones(1))), ("'extra' is left over",)),
    "a wrong shape": (
        lambda d: replace(d, lambda t: t.update({TENSOR: t[TENSOR].T.contiguous()})),
        (TENSOR, "(36, 44)", "(44, 36)"),
    ),
    "NaN": (
        lambda d: replace(d, lambda t: t[TENSOR][3:5, 7].fill_(torch.nan)),
        (WEIGHTS, TENSOR, "in 2 of 1584 places"),
    ),
    "infinity": (lambda d: replace(d, lambda t: t[TENSOR][0, 0].fill_(-torch.inf)), (WEIGHTS, TENSOR, "in 1 of 1584")),
    "quantised": (lambda d: replace(d, lambda t: t.update({TENSOR: t[TENSOR].to(torch.int8)})), (TENSOR, "quantised")),
    "an untied head under a tied config": (
        lambda d: rewrite(d / CONFIG, lambda c: c.update(tie_word_embeddings=True)),
        ("'lm_head.weight' differs from 'model.embed_tokens.weight'", "tie_word_embeddings"),
    ),
    "fewer tensors than layers": (
        lambda d: rewrite(d / CONFIG, lambda c: c.update(num_hidden_layers=10**6)),
        (CONFIG, "num_hidden_layers is 1000000", "21 tensors"),
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_broken_file_is_named(what: str, pristine: Path, tmp_path: Path) -> None:
    damage, mentions = FILES[what]
    directory = shutil.copytree(pristine / "single", tmp_path / "model")
    damage(directory)
    with refusal(str(directory), *mentions):
        LlamaForCausalLM.from_checkpoint(directory)


def set_shard(name: str) -> Damage:
    return lambda d: rewrite(d / INDEX, lambda c: c["weight_map"].update({TENSOR: name}))


def shard_of(directory: Path) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][TENSOR]


def swap_tensors(directory: Path) -> None:
    tensors = load_file(shard_of(directory))
    save_file({"another.weight": tensors.pop(TENSOR), **tensors}, shard_of(directory))


def lose_tensor(directory: Path) -> None:
    tensors = load_file(shard_of(directory))
    del tensors[TENSOR]
    save_file(tensors, shard_of(directory))


SHARDS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a parent directory": (set_shard("../model.safetensors"), (INDEX, TENSOR, "'../model.safetensors'", "outside")),
    "a path from the root": (set_shard("/etc/passwd"), (INDEX, TENSOR, "'/etc/passwd'", "outside")),
    "a path on another system": (set_shard("..\\model.safetensors"), (INDEX, TENSOR, "outside")),
    "a drive": (set_shard("C:model.safetensors"), (INDEX, TENSOR, "outside")),
    "a directory inside": (set_shard("more/model.safetensors"), (INDEX, TENSOR, "outside")),
    "the directory itself": (set_shard("."), (INDEX, TENSOR, "outside")),
    "the parent itself": (set_shard(".."), (INDEX, TENSOR, "outside")),
    "no name": (set_shard(""), (INDEX, TENSOR, "outside")),
    "a name with a NUL": (set_shard("a\0b"), (INDEX, TENSOR, "outside")),
    "no string": (lambda d: rewrite(d / INDEX, lambda c: c["weight_map"].update({TENSOR: 3})), (INDEX, TENSOR)),
    "no weight_map": (lambda d: rewrite(d / INDEX, lambda c: c.pop("weight_map")), (INDEX, "no weight_map")),
    "a weight_map of another kind": (lambda d: rewrite(d / INDEX, lambda c: c.update(weight_map=[1])), (INDEX,)),
    "broken JSON": (lambda d: (d / INDEX).write_text("{"), (INDEX, "no valid JSON")),
    "a shard missing": (lambda d: shard_of(d).unlink(), (INDEX, "is missing", "download this shard")),
    "a shard truncated": (lambda d: shard_of(d).write_bytes(shard_of(d).read_bytes()[:-1]), ("truncated or damaged",)),
    "a tensor that no shard holds": (lose_tensor, (TENSOR, "lacks tensor", INDEX)),
    "a tensor that the index does not list": (swap_tensors, ("'another.weight'", "no shard at all")),
}


@pytest.mark.parametrize("what", SHARDS)
def test_a_broken_index_or_shard_is_named(what: str, pristine: Path, tmp_path: Path) -> None:
    damage, mentions = SHARDS[what]
    directory = shutil.copytree(pristine / "sharded", tmp_path / "model")
    damage(directory)
    with refusal(str(directory), *mentions):
        LlamaForCausalLM.from_checkpoint(directory)


ROPE = {"rope_type": "default", "rope_theta": 500.0}
FIELDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown": ({"hiden_size": 36}, ("'hiden_size'", "did you mean 'hidden_size'?")),
    "of another model": ({"model_type": "mistral"}, ("model_type is 'mistral'", "'llama'")),
    "an encoder's": ({"is_encoder_decoder": True}, ("is_encoder_decoder",)),
    "quantised": ({"quantization_config": {"bits": 4}}, ("'quantization_config'",)),
    "kv heads that divide nothing": (
        {"num_key_value_heads": 4},
        ("num_key_value_heads is 4", "num_attention_heads, 6"),
    ),
    "heads that divide nothing": (
        {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5},
        ("num_attention_heads is 5", "hidden_size, 36"),
    ),
    "odd head_dim": ({"head_dim": 7}, ("head_dim 7", "even")),
    "no heads": ({"num_attention_heads": 0}, ("num_attention_heads is 0",)),
    "negative": ({"hidden_size": -36}, ("hidden_size is -36",)),
    "absurd": ({"head_dim": 10**15}, ("head_dim is 1000000000000000",)),
    "a string for a number": ({"hidden_size": "36"}, ("hidden_size is '36'", "int")),
    "a fraction for a count": ({"vocab_size": 61.5}, ("vocab_size is 61.5", "int")),
    "true for a number": ({"vocab_size": True}, ("vocab_size is True", "int")),
    "null for a number": ({"vocab_size": None}, ("vocab_size is None", "int")),
    "an unknown activation": ({"hidden_act": "silo"}, ("hidden_act is 'silo'", "did you mean 'silu'?", "gelu_new")),
    "an epsilon that is no number": ({"rms_norm_eps": float("nan")}, ("rms_norm_eps is nan",)),
    "a padding token beyond the vocabulary": ({"pad_token_id": 61}, ("pad_token_id is 61",)),
    "an unknown rope type": (
        {"rope_parameters": {**ROPE, "rope_type": "yarm"}},
        ("'yarm'", "did you mean 'yarn'?", "llama3"),
    ),
    "rope without its factor": ({"rope_parameters": {**ROPE, "rope_type": "linear"}}, ("factor", "'linear'")),
    "rope with a field that is not read": (
        {"rope_parameters": {**ROPE, "beta_fast": 32}},
        ("'beta_fast'", "'default' does not read"),
    ),
    "rope of no kind": ({"rope_parameters": [1]}, ("rope_parameters is [1]",)),
    "rope in two spellings": (
        {"rope_parameters": ROPE, "rope_theta": 1e4},
        ("rope_theta", "500.0", "10000.0", "contradict"),
    ),
    "rope types in two spellings": (
        {"rope_parameters": {**ROPE, "type": "linear"}},
        ("type is 'linear'", "rope_type 'default'"),
    ),
    "a negative base": ({"rope_parameters": {**ROPE, "rope_theta": -1.0}}, ("rope_theta", "-1.0", "positive")),
    "a base of one": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}},
        ("define no frequencies",),
    ),
    "factors that do not fit": (
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
        ("short_factor holds 1 numbers", "4 pairs"),
    ),
    "sizes that overflow": (
        {**dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), 2**24), "head_dim": 2**16},
        ("no model has these sizes",),
    ),
}


@pytest.mark.parametrize("what", FIELDS)
def test_a_field_that_cannot_be_is_named(what: str, pristine: Path, tmp_path: Path) -> None:
    fields, mentions = FIELDS[what]
    directory = shutil.copytree(pristine / "single", tmp_path / "model")
    rope_keys = ("rope_theta", "rope_scaling", "rope_parameters")
    rewrite(directory / CONFIG, lambda c: [c.pop(name, None) for name in rope_keys if "rope_parameters" in fields])
    rewrite(directory / CONFIG, lambda c: c.update(fields))
    with refusal(str(directory / CONFIG), *mentions):
        LlamaForCausalLM.from_checkpoint(directory)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_that_is_missing_is_named(field: str, pristine: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(pristine / "single", tmp_path / "model")
    rewrite(directory / CONFIG, lambda c: c.pop(field))
    with refusal(str(directory / CONFIG), f"{field} missing"):
        LlamaForCausalLM.from_checkpoint(directory)


def attempt(directory: Path) -> str | None:
    """The message of the refusal, if the checkpoint is refused. Any other error is a failure of the test."""
    try:
        LlamaForCausalLM.from_checkpoint(directory)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return None


many_examples = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@many_examples
@given(share=st.floats(0, 1, exclude_max=True), name=st.sampled_from([CONFIG, WEIGHTS]))
def test_a_file_cut_anywhere_is_refused(share: float, name: str, pristine: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(pristine / "single", tmp_path / "model", dirs_exist_ok=True)
    whole = (directory / name).read_bytes().rstrip()
    (directory / name).write_bytes(whole[: int(share * len(whole))])
    with refusal(str(directory / name)):
        LlamaForCausalLM.from_checkpoint(directory)


@many_examples
@given(
    place=st.integers(0, 10**4), byte=st.binary(min_size=1, max_size=1), name=st.sampled_from([CONFIG, WEIGHTS, INDEX])
)
def test_no_damage_to_a_header_ends_in_another_error(
    place: int, byte: bytes, name: str, pristine: Path, tmp_path: Path
) -> None:
    kind = "sharded" if name == INDEX else "single"
    directory = shutil.copytree(pristine / kind, tmp_path / kind, dirs_exist_ok=True)
    content = bytearray((directory / name).read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0] if name == WEIGHTS else len(content)
    content[place % header : place % header + 1] = byte
    (directory / name).write_bytes(content)
    message = attempt(directory)
    assert message is None or (str(directory) in message and "\n" not in message)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@many_examples
@given(data=st.data())
def test_no_value_of_a_field_ends_in_another_error(data: st.DataObject, pristine: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(pristine / "single", tmp_path / "model", dirs_exist_ok=True)
    config = json.loads((directory / CONFIG).read_text())
    field = data.draw(st.sampled_from(sorted(config)), label="field")
    within = sorted(config[field]) if isinstance(config[field], dict) else []
    key = data.draw(st.sampled_from(within), label="key") if within else None
    value = data.draw(ANYTHING, label="value")
    rewrite(directory / CONFIG, lambda c: c.update({field: value}) if key is None else c[field].update({key: value}))
    message = attempt(directory)
    assert message is None or (str(directory) in message and "\n" not in message)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_good_checkpoint_is_read(kind: str, pristine: Path, built: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    model = LlamaForCausalLM.from_checkpoint(pristine / kind)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), built[1][name]), name


def test_a_dtype_is_taken_from_the_caller(pristine: Path) -> None:
    model = LlamaForCausalLM.from_checkpoint(pristine / "single", dtype=torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
