"""The formula of a paper as the reference, where no library holds the layer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parity import formulas
from parity.family import Family, Layer
from parity.reference import Reference, cast
from reimpl.weights import slots


def version() -> str:
    """What stands in reports where a library has its version."""
    return "the paper's formula"


class FormulaConfig(SimpleNamespace):
    """The fields of a configuration by name."""

    def to_dict(self) -> dict[str, Any]:
        """All of them."""
        return dict(vars(self))


def make_config(fields: Mapping[str, Any]) -> FormulaConfig:
    """The configuration of the fields, which stay untouched."""
    return FormulaConfig(**deepcopy(dict(fields)))


class FormulaReference(Reference):
    """One formula under one configuration in one dtype, called with hidden states alone."""

    def __init__(self, family: Family, layer: Layer, config: FormulaConfig, dtype: torch.dtype) -> None:
        self.family, self.layer, self.dtype, self.config = family, layer, dtype, deepcopy(config)
        self.use(family.implementations[0])
        self.module: Any = cast(getattr(formulas, layer.reference)(self.config), dtype).eval()
        self.parameters = dict(self.module.named_parameters())
        self.slots, self.place, self.rules, self._rotary = slots(self.module), layer.at, (), None

    @property
    def home(self) -> Any:
        """The module in which the formulas are."""
        return formulas

    def rotary_modules(self) -> list[nn.Module]:
        """None remembers anything."""
        return []
