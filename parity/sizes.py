"""`parity size`: how large models are, published ones or that of a config.json."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from parity import family as families
from parity import reference
from parity.family import FamilyError
from parity.published import MODELS
from parity.table import Bar, as_json, write_atomically
from reimpl.checkpoint import CONFIG_FILE, CheckpointError, read_config
from reimpl.config import ConfigError, nearest
from reimpl.size import COUNTED, Size, size

LENGTH, BYTES = 1024, 2  # tokens of the forward; bytes of a number in half precision
COLUMNS = ("model", "parameters", "used by a token", f"FLOPs of {LENGTH:,} tokens", "cache per token")
PARTS = ("part", "parameters", "used by a token", f"FLOPs of {LENGTH:,} tokens")


def run(model: str | None, config: Path | None, verify: bool, json: Path | None, console: Console) -> int:
    """Print the sizes of a published model, of all, or of a config.json; of one also those of its parts.

    Args:
        verify: hold them against the reference, too. Then 1 is returned where they differ; else 0.

    Raises:
        FamilyError, ConfigError, CheckpointError: for an unknown model, or a config.json that cannot be read.
        ReportError: if the report cannot be written.
    """
    start, fields = time.perf_counter(), chosen(model, config)
    found = {name: of(each) for name, each in fields.items()} if config is None else {str(config): of_file(config)}
    _print(COLUMNS, [(name, *cells(each)) for name, each in found.items()], console)
    if len(found) == 1:
        ((name, one),) = found.items()
        layers = families.load(str(fields[name]["model_type"])).config.from_dict(fields[name]).num_hidden_layers
        _print(PARTS, parts(one), console)
        if one.cached:
            kept, whole = one.cached // layers, one.expanded // layers
            console.print(f"cache per token and layer: {kept:,} numbers, of {whole:,} of keys and values for each head")
    bars = [bar for name, each in fields.items() for bar in held(name, each)] if verify else []
    if verify:
        wrong = [bar["name"] for bar in bars if not bar["holds"]]
        said = f"{', '.join(wrong)} differ" if wrong else f"all {len(bars)} numbers are those of the reference"
        console.print(f"{said}, built on the meta device")
    if json is not None:
        report = {name: details(each) for name, each in found.items()}
        write_atomically(json, as_json({"seconds": time.perf_counter() - start, "bars": bars, "models": report}))
    return 0 if all(bar["holds"] for bar in bars) else 1


def chosen(model: str | None, config: Path | None) -> dict[str, Mapping[str, Any]]:
    """The configurations that are asked for, by name.

    Raises:
        FamilyError, CheckpointError: for an unknown model, or a config.json that cannot be read.
    """
    if config is not None:
        return {str(config): read_config(_directory(config))}
    if model is None:
        return dict(MODELS)
    if model not in MODELS:
        raise FamilyError(f"unknown model {model!r}{nearest(model, MODELS)}; known are {', '.join(MODELS)}")
    return {model: MODELS[model]}


def of(fields: Mapping[str, Any]) -> Size:
    """The size that the fields of a config.json give.

    Raises:
        FamilyError, ConfigError: for a model that is not counted, or a field that makes no sense.
    """
    if "model_type" not in fields:
        raise FamilyError(f"model_type is missing, which names the family: add it ({', '.join(counted())})")
    return size(families.load(str(fields["model_type"])).config.from_dict(fields))


def of_file(path: Path) -> Size:
    """The size of the model whose config.json this is, or lies in this directory."""
    directory = _directory(path)
    try:
        return of(read_config(directory))
    except (FamilyError, ConfigError) as error:
        raise ConfigError(f"{directory / CONFIG_FILE}: {error}") from error


def _directory(path: Path) -> Path:
    if path.is_file() and path.name != CONFIG_FILE:
        raise CheckpointError(f"{path} is not named {CONFIG_FILE}: rename it, or give the directory that holds one")
    return path.parent if path.name == CONFIG_FILE else path


def counted() -> list[str]:
    """The model types whose sizes are counted."""
    return sorted(str(kind.ONLY["model_type"]) for kind in COUNTED)


def held(name: str, fields: Mapping[str, Any], batch: int = 1, length: int = 4) -> list[Bar]:
    """Parameters and FLOPs beside those of the reference with its head, which is built on the meta device.

    Unfused, all its products are seen; its experts are computed in a way that needs no values.
    """
    family, ours = families.load(str(fields["model_type"])), of(_as_read(fields))
    with torch.device("meta"):
        model = built(family.model_type, family.layers[-1].reference, fields)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(batch, length, dtype=torch.long))
    theirs = {
        "parameters": (ours.parameters, sum(each.numel() for each in model.parameters())),
        f"FLOPs of {batch} x {length} tokens": (ours.flops(batch, length), counter.get_total_flops()),
    }
    return [
        {"name": f"{name}/{what}", "value": number, "unit": "", "bar": wanted, "holds": number == wanted}
        for what, (number, wanted) in theirs.items()
    ]


def built(model_type: str, reference_class: str, fields: Mapping[str, Any]) -> Any:
    """The reference, computing unfused."""
    config = reference.make_config(copy.deepcopy(dict(fields)))
    config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
    return reference.layer_class(model_type, reference_class)(config).eval()


def _as_read(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All fields, as the reference completes and writes them."""
    return reference.make_config(copy.deepcopy(dict(fields))).to_dict()


def _print(columns: tuple[str, ...], rows: list[tuple[str, ...]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def cells(each: Size) -> tuple[str, ...]:
    """What a table says of a size."""
    return (
        f"{each.parameters:,}",
        f"{each.used:,}",
        f"{each.flops(1, LENGTH):.3e}",
        f"{each.cached * BYTES:,} bytes" if each.cached else "none",
    )


def parts(each: Size) -> list[tuple[str, ...]]:
    """What a table says of the parts of a size."""
    return [(p.name, f"{p.parameters:,}", f"{p.used:,}", f"{p.flops(LENGTH):.3e}") for p in each.parts]


def details(each: Size) -> dict[str, Any]:
    """What a report says of a size."""
    return {
        "parameters": each.parameters,
        "used_by_a_token": each.used,
        "flops": each.flops(1, LENGTH),
        "length": LENGTH,
        "cache_numbers_per_token": each.cached,
        "expanded_cache_numbers_per_token": each.expanded,
        "parts": {
            part.name: {"parameters": part.parameters, "used_by_a_token": part.used, "flops": part.flops(LENGTH)}
            for part in each.parts
        },
    }
