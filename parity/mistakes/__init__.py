"""What people get wrong when they write a layer again: one file for each kind, found because it is there.

One list, two uses. Switched on in our own layers, it proves that the harness sees such mistakes; held against a foreign
layer that differs, it names the cause.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from difflib import get_close_matches
from functools import cache

from parity.family import FamilyError
from parity.mistakes.mistake import Mistake, Place

__all__ = ["Mistake", "Place", "catalogue", "find", "kinds", "of"]


@cache
def catalogue() -> tuple[Mistake, ...]:
    """Every mistake, kind by kind."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(
        replace(mistake, kind=module.KIND) for module in modules for mistake in getattr(module, "MISTAKES", ())
    )


def kinds() -> tuple[str, ...]:
    """The kinds of mistakes there are."""
    return tuple(dict.fromkeys(mistake.kind for mistake in catalogue()))


def find(name: str) -> Mistake:
    """The mistake of that name.

    Raises:
        FamilyError: naming the nearest.
    """
    known = {mistake.name: mistake for mistake in catalogue()}
    if name not in known:
        close = get_close_matches(name, known, n=1)
        raise FamilyError(f"unknown mistake {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return known[name]


def of(model_type: str, layer: str) -> tuple[Mistake, ...]:
    """The mistakes that a layer of a family can make."""
    return tuple(mistake for mistake in catalogue() if layer in mistake.where.get(model_type, ()))
