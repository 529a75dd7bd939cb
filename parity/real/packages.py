"""Trained weights inside installed packages. None is imported: each is read as a folder of files."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from reimpl.checkpoint import CheckpointError

MISSING = "the package {} is missing, install it with `make real`: it"


def weights_file(package: str, suffix: str) -> Path:
    """The file of a package that ends so.

    Raises:
        CheckpointError: if the package is not installed.
    """
    try:
        found = [path for path in metadata.files(package) or () if path.suffix == suffix]
        return Path(str(found[0].locate()))
    except (metadata.PackageNotFoundError, IndexError) as error:
        raise CheckpointError(f"{MISSING.format(package)} carries the weights") from error
