"""`parity new`: a test file for a layer in its own repository."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from parity.check.candidate import load
from parity.check.resolve import resolve
from parity.check.subject import SubjectError
from parity.errors import InputError
from parity.table import write_atomically
from parity.tiny import models

TEMPLATE = '''"""{name} is the same function as {reference} of transformers: `pytest {file}`."""

import parity

{imported}

test_{what} = parity.against("{reference}").check({candidate})
'''


def new(place: str, against: str | None, out: Path | None) -> Path:
    """Write the file, and say where it is.

    Raises:
        InputError: if the layer or the reference is not there, or the file is already.
    """
    target = load(place)
    name = place.rpartition(":")[2] if ":" in place else target.__name__
    reference = against or guess(name)
    try:
        resolve(reference)
    except SubjectError as error:
        raise InputError(str(error)) from error
    what = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")
    file = out or Path(f"test_{what}.py")
    if file.exists():
        raise InputError(f"{file}: is there already; name another one with --out")
    source = place.rpartition(":")[0] or place
    module = source.removesuffix(".py").strip("./").replace("/", ".")
    if source.endswith(".py") and not _is_importable(Path(source)):
        imported, candidate = "", f'"{source}:{name}"'
    else:
        imported, candidate = f"from {module} import {name}\n", name
    text = TEMPLATE.format(
        name=name, reference=reference, file=file.name, imported=imported, what=what, candidate=candidate
    )
    write_atomically(file, text.replace("\n\n\n\n", "\n\n"))
    return file


def _is_importable(path: Path) -> bool:
    """Whether a file can be imported from here by its name: it lies below, and every directory can be a package."""
    return not path.is_absolute() and all(part.isidentifier() for part in path.with_suffix("").parts)


def guess(name: str) -> str:
    """The reference that a class is named after, such as llama:LlamaAttention for MyLlamaAttention.

    Raises:
        InputError: if there is none.
    """
    plain = name.lower()
    for model_type in sorted(models.all_model_types(), key=len, reverse=True):
        if model_type.replace("_", "") in plain:
            classes = models.class_names(model_type)
            if found := [each for each in classes if each.lower() in plain]:
                return f"{model_type}:{max(found, key=len)}"
            if close := get_close_matches(name, classes, n=1):
                return f"{model_type}:{close[0]}"
    raise InputError(f"{name}: cannot be told from its name what it is the same as; say --against model_type:Class")
