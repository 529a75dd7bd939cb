"""Rules between the names and shapes of tensors on disk and those in a module, in both directions.

A rule takes the tensors it names out of what is left and gives those they become. A tensor that no rule names keeps its
name. Nothing passes in silence: a tensor left over, a parameter not filled and a shape that differs are errors.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


class WeightError(ValueError):
    """Tensors that do not fit the module they are meant for."""


@runtime_checkable
class Rule(Protocol):
    """One correspondence. Both methods remove the tensors that they convert from their argument."""

    def to_module(self, disk: Tensors) -> Tensors: ...

    def to_disk(self, module: Tensors) -> Tensors: ...


@dataclass(frozen=True)
class Same:
    """Another name, the same tensor."""

    disk: str
    module: str

    def to_module(self, disk: Tensors) -> Tensors:
        return {self.module: take(disk, self.disk)}

    def to_disk(self, module: Tensors) -> Tensors:
        return {self.disk: take(module, self.module)}


@dataclass(frozen=True)
class Transposed:
    """A matrix stored as [in, out], as GPT-2 does."""

    disk: str
    module: str

    def to_module(self, disk: Tensors) -> Tensors:
        return {self.module: take(disk, self.disk).mT}

    def to_disk(self, module: Tensors) -> Tensors:
        return {self.disk: take(module, self.module).mT}


@dataclass(frozen=True)
class Split:
    """One tensor on disk, several in the module, side by side along `dim`, as packed queries, keys and values are."""

    disk: str
    module: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0

    def to_module(self, disk: Tensors) -> Tensors:
        whole = take(disk, self.disk)
        if whole.dim() <= self.dim or whole.shape[self.dim] != sum(self.sizes):
            raise WeightError(
                f"tensor {self.disk!r} has shape {tuple(whole.shape)}, but axis {self.dim} must hold"
                f" {' + '.join(map(str, self.sizes))} = {sum(self.sizes)} for {', '.join(self.module)}"
            )
        return dict(zip(self.module, whole.split(self.sizes, self.dim), strict=True))

    def to_disk(self, module: Tensors) -> Tensors:
        return {self.disk: torch.cat([take(module, name) for name in self.module], self.dim)}


@dataclass(frozen=True)
class Stacked:
    """Several tensors on disk, one in the module with a new first axis, as the experts of a layer are.

    Where a slice of that axis is itself made of several tensors, one below the other as gate and up projections are,
    `disk` holds a tuple of their names.
    """

    disk: tuple[str | tuple[str, ...], ...]
    module: str

    def to_module(self, disk: Tensors) -> Tensors:
        names = [name for slice_names in self._slices for name in slice_names]
        parts = [take(disk, name) for name in names]
        for name, part in zip(names, parts, strict=True):
            if part.shape != parts[0].shape:
                raise WeightError(
                    f"tensor {name!r} has shape {tuple(part.shape)}, but {names[0]!r}, which stands beside it in"
                    f" {self.module!r}, has {tuple(parts[0].shape)}"
                )
        stacked = torch.stack(parts)
        if isinstance(self.disk[0], tuple):
            stacked = stacked.unflatten(0, (len(self.disk), -1)).flatten(1, 2)
        return {self.module: stacked}

    def to_disk(self, module: Tensors) -> Tensors:
        disk: Tensors = {}
        for names, part in zip(self._slices, take(module, self.module).unbind(), strict=True):
            disk |= zip(names, part.chunk(len(names)), strict=True)
        return disk

    @property
    def _slices(self) -> list[tuple[str, ...]]:
        return [(names,) if isinstance(names, str) else names for names in self.disk]


@dataclass(frozen=True)
class Permuted:
    """The same rows in another order: row i of the module is row order[i] on disk (see `rope.half_order`).

    With `dim` 1 the columns, as where the heads that are read stand in another order.
    """

    disk: str
    module: str
    order: tuple[int, ...]
    dim: int = 0

    def to_module(self, disk: Tensors) -> Tensors:
        stored = take(disk, self.disk)
        if stored.dim() <= self.dim or stored.shape[self.dim] != len(self.order):
            raise WeightError(
                f"tensor {self.disk!r} has shape {tuple(stored.shape)}, but {len(self.order)} are to be permuted along"
                f" axis {self.dim}"
            )
        return {self.module: stored.index_select(self.dim, torch.tensor(self.order))}

    def to_disk(self, module: Tensors) -> Tensors:
        return {self.disk: take(module, self.module).index_select(self.dim, torch.tensor(self.order).argsort())}


@dataclass(frozen=True)
class Tied:
    """A second name of a tensor, absent from most checkpoints. One that is there must hold the same numbers."""

    disk: str
    twin: str

    def to_module(self, disk: Tensors) -> Tensors:
        stored = disk.pop(self.disk, None)
        if stored is not None and self.twin in disk and not torch.equal(stored, disk[self.twin]):
            raise WeightError(
                f"tensor {self.disk!r} differs from {self.twin!r}, but the config ties them (tie_word_embeddings); set"
                " it to false there, or remove the tensor"
            )
        return {}

    def to_disk(self, module: Tensors) -> Tensors:
        return {}


@dataclass(frozen=True)
class Derived:
    """Tensors that follow from the config and that old checkpoints hold all the same, recognised by how names end."""

    ending: str

    def to_module(self, disk: Tensors) -> Tensors:
        for name in [name for name in disk if name.endswith(self.ending)]:
            del disk[name]
        return {}

    def to_disk(self, module: Tensors) -> Tensors:
        return {}


def stacked_experts(
    at: str, count: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, Rule]:
    """Experts that are each by themselves on disk, stacked in the module: the rows of the gate above those of up."""
    parts = [f"{at}.{expert}" for expert in range(count)]
    gate_up = tuple((f"{part}.{gate}.weight", f"{part}.{up}.weight") for part in parts)
    downs = tuple(f"{part}.{down}.weight" for part in parts)
    return Stacked(gate_up, f"{at}.gate_up_proj"), Stacked(downs, f"{at}.down_proj")


def take(tensors: Tensors, name: str) -> Tensor:
    if name not in tensors:
        raise WeightError(
            f"tensor {name!r} is missing; the checkpoint is incomplete, or its config is of another model"
        )
    return tensors.pop(name)


def below(rules: Iterable[Rule], prefix: str) -> tuple[Rule, ...]:
    """The rules that name tensors on disk whose names begin so: those of a part of a model."""
    return tuple(rule for rule in rules if any(name.startswith(prefix) for name in names_on_disk(rule)))


def names_on_disk(rule: Rule) -> Iterator[str]:
    """The tensors on disk that a rule names."""
    names = getattr(rule, "disk", ())
    for each in (names,) if isinstance(names, str) else names:
        yield from (each,) if isinstance(each, str) else each


def to_module(disk: Mapping[str, Tensor], rules: Iterable[Rule] = ()) -> Tensors:
    """From names on disk to names in the module."""
    left = dict(disk)
    converted: Tensors = {}
    for rule in rules:
        converted |= rule.to_module(left)
    return converted | left


def to_disk(module: Mapping[str, Tensor], rules: Iterable[Rule] = ()) -> Tensors:
    """From names in the module to names on disk."""
    left = dict(module)
    converted: Tensors = {}
    for rule in rules:
        converted |= rule.to_disk(left)
    return converted | left


def slots(module: nn.Module) -> Tensors:
    """What a checkpoint must fill: parameters and persistent buffers, each once, under the first of its names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def match(module: nn.Module, disk: Mapping[str, Tensor], rules: Iterable[Rule] = ()) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor of the module and the one on disk that belongs there, or WeightError for what does not fit."""
    wanted, given = slots(module), to_module(disk, rules)
    if missing := wanted.keys() - given.keys():
        raise WeightError(
            f"tensor {_some(missing)} missing, which the config asks for; the checkpoint is incomplete, or its config"
            " is of another model"
        )
    if unexpected := given.keys() - wanted.keys():
        raise WeightError(
            f"tensor {_some(unexpected)} left over: the config asks for no such tensor; remove what does not belong to"
            " the model, or correct the config (its number of layers, its biases)"
        )
    for name, slot in wanted.items():
        if given[name].shape != slot.shape:
            raise WeightError(
                f"tensor {name!r} has shape {tuple(given[name].shape)}, but the config asks for {tuple(slot.shape)};"
                " correct the sizes in the config, or take the tensor from where the config comes from"
            )
        if given[name].is_floating_point() != slot.is_floating_point():
            raise WeightError(
                f"tensor {name!r} is {given[name].dtype}, but the model computes in {slot.dtype}; quantised weights are"
                " not read, so take the checkpoint they were made from"
            )
    return [(slot, given[name]) for name, slot in wanted.items()]


def fill(module: nn.Module, disk: Mapping[str, Tensor], rules: Iterable[Rule] = ()) -> None:
    """Copy tensors into the module. If that fails it is left full of NaN, so that nobody computes with half of them."""
    with torch.no_grad():
        for slot in slots(module).values():
            slot.fill_(torch.nan if slot.is_floating_point() else 0)
        for slot, tensor in match(module, disk, rules):
            slot.copy_(tensor)


def _some(names: Iterable[str]) -> str:
    """The first name, and how many more there are."""
    first, *others = sorted(names)
    return f"{first!r} and {len(others)} more are" if others else f"{first!r} is"
