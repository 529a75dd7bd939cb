"""Reading a checkpoint in Hugging Face's layout: config.json beside safetensors, one file or shards and an index.

Pickled weights are refused and never opened, as unpickling runs code. Whatever else is wrong with the files ends in a
CheckpointError that names the file, the tensor or the field, and what to do.
"""

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from reimpl.config import Config, ConfigError
from reimpl.precision import convert
from reimpl.weights import Rule, WeightError, fill, match

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
AGAIN = "download or write it again"


P = TypeVar("P", bound="Pretrained")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit its config."""


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of config.json, and every tensor by its name on disk."""
    return read_config(path), read_tensors(path)


def read_config(path: Path) -> dict[str, Any]:
    """The fields of config.json."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}: a checkpoint is a directory with {CONFIG_FILE} and {WEIGHTS_FILE}")
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{path} holds no {CONFIG_FILE}, which says what its tensors mean: add the one they were saved with"
            f" ({_contents(path)})"
        )
    return _read_object(path / CONFIG_FILE)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor by its name on disk."""
    if (path / WEIGHTS_FILE).is_file():
        return dict(_read_file(path / WEIGHTS_FILE))
    if (path / INDEX_FILE).is_file():
        return _read_shards(path, _weight_map(path / INDEX_FILE))
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"{path} holds pickled weights only ({', '.join(pickled)}), which are not opened, as unpickling runs code:"
            f" convert them to {WEIGHTS_FILE} where they come from"
        )
    raise CheckpointError(f"{path} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: {AGAIN} ({_contents(path)})")


def _contents(path: Path) -> str:
    names = sorted(file.name for file in path.iterdir())
    return f"the directory holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "it is empty"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no valid JSON ({error}): correct it, or {AGAIN}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__} where an object with fields belongs: {AGAIN}")
    return content


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to the shards that hold them: {AGAIN}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise CheckpointError(
                f"{index} places tensor {name!r} in {shard!r}, outside of the directory, where a shard must not"
                " be: do not trust this checkpoint, or correct its index"
            )
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                f"{index} places tensor {name!r} in {shard!r}, which is missing: download this shard too"
            )
    return weight_map


def _stays_inside(shard: str) -> bool:
    """Whether a name is that of a file in the directory itself, read as any system would read it."""
    return (
        shard not in ("", "..")
        and "\0" not in shard
        and shard == PurePosixPath(shard).name == PureWindowsPath(shard).name
    )


def _read_shards(path: Path, weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in _read_file(path / shard):
            if weight_map.get(name) != shard:
                listed = weight_map.get(name, "no shard at all")
                raise CheckpointError(
                    f"{path / shard} holds tensor {name!r}, which {INDEX_FILE} places in {listed}: shards and index"
                    " are of different checkpoints; download all of them again"
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{path / shard} lacks tensor {name!r}, which {INDEX_FILE} places there: {AGAIN}")
    return tensors


def _read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, _checked(file, name, opened.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is no complete safetensors file ({error}): it is truncated or damaged; {AGAIN}"
        ) from error


def _checked(file: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and tensor.element_size() > 1:
        bad = int(tensor.numel() - tensor.isfinite().sum())
        if bad:
            raise CheckpointError(
                f"{file}: tensor {name!r} holds NaN or infinity in {bad} of {tensor.numel()} places, so all that is"
                f" computed with it would: {AGAIN}, or take a save from before its training diverged"
            )
    return tensor


class Pretrained(nn.Module):
    """A model that is built from a configuration and can be read from a checkpoint."""

    CONFIG: ClassVar[type[Config]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def weight_rules(cls, config: Any) -> tuple[Rule, ...]:
        """How names on disk become names in this module, where they differ."""
        return ()

    @classmethod
    def modern(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names on disk today, where old checkpoints have others."""
        return dict(tensors)

    @classmethod
    def from_checkpoint(cls: type[P], path: str | PathLike[str], dtype: torch.dtype | None = None) -> P:
        """The model saved in a directory, in evaluation mode, in `dtype` or else in the widest that a tensor has."""
        path = Path(path)
        fields = read_config(path)
        try:
            config = cls.CONFIG.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{path / CONFIG_FILE}: {error}") from error
        tensors, rules = cls.modern(read_tensors(path)), cls.weight_rules(config)
        try:
            match(_skeleton(cls, config, path, len(tensors)), tensors, rules)
        except WeightError as error:
            raise CheckpointError(f"{path}: {error}") from error
        model = convert(cls(config), dtype or _widest(tensors))
        fill(model, tensors, rules)
        return model.eval()


def _skeleton(model_class: type[P], config: Any, path: Path, tensors: int) -> P:
    """The model without memory for its parameters, to find sizes that do not fit before memory is asked for."""
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > tensors:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: num_hidden_layers is {layers}, but the checkpoint holds {tensors} tensors in all;"
            " correct the number, or download the missing shards"
        )
    try:
        with torch.device("meta"):
            return model_class(config)
    except RuntimeError as error:  # torch's, where a number of elements overflows
        raise ConfigError(f"{path / CONFIG_FILE}: no model has these sizes ({error}): correct them") from error


def _widest(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()})
