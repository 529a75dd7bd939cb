"""Long runs that can be stopped: each result is a line of a log once it is there, and the same call goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from parity.errors import ReportError

Done = TypeVar("Done")


class Journal(Generic[Done]):
    """A file with a line that says what the run is, and a line per result.

    Args:
        path: of the file.
        run: all that must be the same for a run to be the same.
        of: the dataclass of a result.
        read: makes one of its fields; by default the class itself.

    Raises:
        ReportError: if the file cannot be read or written, or belongs to another run.
    """

    def __init__(
        self, path: Path, run: dict[str, Any], of: type[Done], read: Callable[[dict[str, Any]], Done] | None = None
    ) -> None:
        names = {field.name for field in fields(of)}  # type: ignore[arg-type]
        head, lines = _read(path)
        if head and head != run:
            raise ReportError(f"{path} is the log of another run, {head}; name another file, or remove it")
        make = read or (lambda line: of(**line))
        self.done = [make(line) for line in lines if line.keys() == names]
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ReportError(f"{path}: the log cannot be written ({error.strerror}); name another file") from error
        self._write(run)
        for each in self.done:
            self._write(asdict(each))  # type: ignore[call-overload]

    def add(self, done: Done) -> None:
        """Note a result."""
        self.done.append(done)
        self._write(asdict(done))  # type: ignore[call-overload]

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a log says that the run is, and its results; nothing where there is none yet."""
    try:
        head, *lines = (path.read_text(encoding="utf-8") if path.exists() else "").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as the log of a run ({error}); name another file") from error
    if head and not _object(head):
        raise ReportError(f"{path} is no log of a run: it begins with {head[:80]!r}; name another file")
    return _object(head), [_object(line) for line in lines]


def _object(line: str) -> dict[str, Any]:
    """A line of the log; nothing where it was not written to its end."""
    with suppress(ValueError):
        read = json.loads(line)
        return read if isinstance(read, dict) else {}
    return {}
