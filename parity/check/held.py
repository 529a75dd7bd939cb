"""What modules remember of earlier calls in themselves, not in a cache: tensors and numbers among their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Held = dict[tuple[str, str], Any]
"""By the name of a part and that of its attribute or buffer."""


class Holder:
    """Looks at what a module holds; a tensor is copied only once it is another than at first."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = {place: (value, _version(value), _copied(value)) for place, value in _there(module)}

    def held(self) -> Held:
        """All that the module holds now."""
        return {place: self._known(place, value) for place, value in _there(self._module)}

    def _known(self, place: tuple[str, str], value: Any) -> Any:
        same, version, copy = self._first.get(place, (self, 0, None))
        return copy if value is same and _version(value) == version else _copied(value)


def changing(moments: Iterable[Held]) -> set[tuple[str, str]]:
    """The places at which something else is held at some moment than at the first."""
    first, *others = moments
    return {place for each in others for place in {*first, *each} if not _same(first.get(place), each.get(place))}


def restore(module: nn.Module, held: Mapping[tuple[str, str], Any]) -> None:
    """Let a module hold what it, or one like it, held before; a part that it lacks is passed over."""
    parts = dict(module.named_modules())
    with torch.no_grad():
        for (name, attribute), value in held.items():
            if name not in parts or not hasattr(parts[name], attribute):
                continue
            now = getattr(parts[name], attribute)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.is_floating_point():
                value = value.to(now.dtype)
            setattr(parts[name], attribute, _copied(value))


def _there(module: nn.Module) -> Iterable[tuple[tuple[str, str], Any]]:
    for name, part in module.named_modules():
        for attribute, value in {**vars(part), **part._buffers}.items():
            if value is None or isinstance(value, Tensor | int | float):
                yield (name, attribute), value


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
