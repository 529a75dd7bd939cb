"""Finding a class of the reference by what is written on the command line."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path

from parity.check.subject import Subject, SubjectError
from parity.tiny import models, shrink


def resolve(text: str, task: str | None = None) -> Subject:
    """`llama:LlamaAttention`, `LlamaAttention`, `llama` for the whole model, or a checkpoint's directory.

    Args:
        task: causal, masked or seq2seq, where a model type has several heads; else the first that has the class.

    Raises:
        SubjectError: naming what is near.
    """
    if Path(text).is_dir():
        return _checkpoint(Path(text))
    model_type, colon, name = text.partition(":")
    if not colon and not _known(model_type):
        model_type, name = _by_class(text), text
    if not _known(model_type):
        raise SubjectError(f"no model type {model_type!r}{_near(model_type, models.all_model_types())}")
    _check_class(model_type, name)
    there = models.tasks(model_type)
    if not there:
        raise SubjectError(f"{model_type} has no language-model head, so there is no text to run through it")
    if task is not None and task not in there:
        raise SubjectError(f"{model_type} has no head for {task}; it has {', '.join(there)}")
    return Subject(model_type, name or None, task or there[0])


def _known(model_type: str) -> bool:
    return model_type in models.all_model_types()


def _near(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _by_class(name: str) -> str:
    """The model type whose name a class begins with, the longest one.

    Raises:
        SubjectError: if there is none.
    """
    squashed = name.lower()
    begins = [each for each in models.all_model_types() if squashed.startswith(re.sub(r"[-_]", "", each))]
    for model_type in sorted(begins, key=len, reverse=True):
        if name in models.class_names(model_type):
            return model_type
    near = [each for model_type in begins for each in models.class_names(model_type)]
    hint = _near(name, near + models.all_model_types())
    raise SubjectError(f"no reference {name!r}: name it as model_type:Class, such as llama:LlamaAttention{hint}")


def _check_class(model_type: str, name: str) -> None:
    try:
        names = models.class_names(model_type)
    except shrink.Unshrinkable as error:
        raise SubjectError(str(error)) from error
    if name and name not in names:
        raise SubjectError(f"{model_type} has no class {name!r}{_near(name, names) or '; it has ' + ', '.join(names)}")


def _checkpoint(directory: Path) -> Subject:
    """A checkpoint's own model.

    Raises:
        SubjectError: naming the file and what is wrong with it.
    """
    file = directory / "config.json"
    try:
        model_type = json.loads(file.read_text("utf-8"))["model_type"]
    except OSError as error:
        raise SubjectError(f"{file}: {error.strerror or error}: {directory} is no checkpoint") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SubjectError(f"{file}: no model_type can be read from it ({type(error).__name__}: {error})") from error
    if not isinstance(model_type, str) or not _known(model_type):
        raise SubjectError(f"{file}: no model type {model_type!r}{_near(str(model_type), models.all_model_types())}")
    there = models.tasks(model_type)
    if not there:
        raise SubjectError(f"{file}: {model_type} has no language-model head")
    return Subject(model_type, None, there[0], directory)
