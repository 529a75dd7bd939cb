"""Writing a checkpoint directory as Hugging Face lays it out."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

RopeKeys = Literal["v4", "v5", "both"]

WEIGHTS = "model*.safetensors*"


def write(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int | None = None,
    rope_keys: RopeKeys = "both",
) -> None:
    """Write config.json and the weights, replacing a checkpoint that is there; other files stay.

    Nothing is touched until everything is written beside it. While the files are then moved into place there is no
    config.json, so that an interrupted write leaves no checkpoint rather than a mixture of two.

    Args:
        directory: is made, with its parents.
        config: with rope keys in the spelling of transformers 5.
        tensors: by name on disk.
        dtype: of all tensors on disk.
        shard_bytes: the size above which another file is begun; None writes a single one.
        rope_keys: whose spelling config.json gets. Version 4 reads that of version 5 without an error and *without* its
            theta, so a checkpoint for both has both.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in sorted(tensors.items())}
    text = {**spelled(config, rope_keys), "dtype": str(dtype).removeprefix("torch.")}
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as temporary:
        staging = Path(temporary)
        write_weights(staging, shards(stored, shard_bytes))
        write_json(staging / "config.json", text)
        (directory / "config.json").unlink(missing_ok=True)
        for old in directory.glob(WEIGHTS):
            old.unlink()
        for new in staging.glob(WEIGHTS):
            os.replace(new, directory / new.name)
        os.replace(staging / "config.json", directory / "config.json")


def spelled(config: Mapping[str, Any], keys: RopeKeys) -> dict[str, Any]:
    """The configuration with its rope keys (one set for all layers) in the spelling of transformers 4, 5 or both."""
    spelled = dict(config)
    rope = dict(spelled.get("rope_parameters") or {})
    if not rope or keys == "v5":
        return spelled
    if keys == "v4":
        del spelled["rope_parameters"]
    spelled["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        spelled["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    spelled["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return spelled


def shards(tensors: Mapping[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    """Consecutive tensors grouped into shards of at most `limit` bytes; a larger tensor gets one of its own."""
    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if limit is not None and groups[-1] and filled + tensor.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    return groups


def write_weights(directory: Path, groups: list[dict[str, Tensor]]) -> None:
    """One file, or one per group and the index that says which tensor is where."""
    total = len(groups)
    files = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    if total == 1:
        files = ["model.safetensors"]
    for file, group in zip(files, groups, strict=True):
        (directory / file).write_bytes(save(group, metadata={"format": "pt"}))
    if total > 1:
        size = sum(tensor.nbytes for group in groups for tensor in group.values())
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Keys in order and a newline at the end, so that the same content is the same file."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
