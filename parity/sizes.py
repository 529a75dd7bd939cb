"""`parity size`: how large models are, published ones or that of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parity import family as families
from parity.family import FamilyError
from parity.published import MODELS
from parity.table import as_json, write_atomically
from reimpl.checkpoint import CONFIG_FILE, read_config
from reimpl.config import ConfigError, nearest
from reimpl.size import Size, size

LENGTH, BYTES = 1024, 2  # tokens of the forward; bytes of a number in half precision
COLUMNS = ("model", "parameters", "used by a token", f"FLOPs of {LENGTH:,} tokens", "cache per token")


def run(model: str | None, config: Path | None, json: Path | None, console: Console) -> int:
    """Print the sizes of a published model, of all, or of a config.json; 0 is returned.

    Raises:
        FamilyError, ConfigError, CheckpointError: for an unknown model, or a config.json that cannot be read.
        ReportError: if the report cannot be written.
    """
    if config is not None:
        found = {str(config): of_file(config)}
    elif model is None:
        found = {name: of(fields) for name, fields in MODELS.items()}
    elif model in MODELS:
        found = {model: of(MODELS[model])}
    else:
        raise FamilyError(f"unknown model {model!r}{nearest(model, MODELS)}; known are {', '.join(MODELS)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, each in found.items():
        table.add_row(name, *cells(each))
    console.print(table)
    if json is not None:
        write_atomically(json, as_json({name: details(each) for name, each in found.items()}))
    return 0


def of(fields: Mapping[str, Any]) -> Size:
    """The size that the fields of a config.json give."""
    return size(families.load(str(fields.get("model_type"))).config.from_dict(fields))


def of_file(path: Path) -> Size:
    """The size of the model whose config.json this is, or lies in this directory."""
    directory = path if path.is_dir() or path.name != CONFIG_FILE else path.parent
    try:
        return of(read_config(directory))
    except (FamilyError, ConfigError) as error:
        raise ConfigError(f"{directory / CONFIG_FILE}: {error}") from error


def cells(each: Size) -> tuple[str, ...]:
    """What a table says of a size."""
    return (
        f"{each.parameters:,}",
        f"{each.used:,}",
        f"{each.flops(1, LENGTH):.3e}",
        f"{each.cached * BYTES:,} bytes" if each.cached else "none",
    )


def details(each: Size) -> dict[str, Any]:
    """What a report says of a size."""
    return {
        "parameters": each.parameters,
        "used_by_a_token": each.used,
        "flops": each.flops(1, LENGTH),
        "length": LENGTH,
        "cache_numbers_per_token": each.cached,
        "expanded_cache_numbers_per_token": each.expanded,
        "parts": {part.name: part.parameters for part in each.parts},
    }
