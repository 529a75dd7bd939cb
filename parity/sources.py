"""Where references come from: each library with its version, its configurations and the way its layers are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parity import formula_reference, reference, torch_reference
from parity.family import Family


@dataclass(frozen=True)
class Source:
    """A library that holds reference layers.

    Attributes:
        version: the installed one, as it is named in reports.
        make_config: the library's configuration of a family's fields.
        side: one reference layer under a configuration in a dtype.
    """

    version: Callable[[], str]
    make_config: Callable[[Mapping[str, Any]], Any]
    side: Callable[..., reference.Reference]


SOURCES: Mapping[str, Source] = {
    "transformers": Source(reference.version, reference.make_config, reference.Reference),
    "torch": Source(torch_reference.version, torch_reference.make_config, torch_reference.TorchReference),
    "formula": Source(formula_reference.version, formula_reference.make_config, formula_reference.FormulaReference),
}


def source_of(family: Family) -> Source:
    """The library that holds a family's references."""
    return SOURCES[family.library]
