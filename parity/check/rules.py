"""Rules from the reference's tensors to the candidate's beyond those of `reimpl.weights`; in words, and as a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reimpl.weights import Permuted, Rule, Same, Split, Stacked, Tensors, Transposed, take

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Turned:
    """A rule the other way round: what it calls disk is the candidate's, what it calls module is the reference's."""

    rule: Rule

    def to_module(self, disk: Tensors) -> Tensors:
        return self.rule.to_disk(disk)

    def to_disk(self, module: Tensors) -> Tensors:
        return self.rule.to_module(module)


@dataclass(frozen=True)
class Ignored:
    """A tensor of the reference that the candidate has no use for, and why."""

    disk: str
    reason: str

    def to_module(self, disk: Tensors) -> Tensors:
        take(disk, self.disk)
        return {}

    def to_disk(self, module: Tensors) -> Tensors:
        return {}


@dataclass(frozen=True)
class Own:
    """A parameter or buffer of the candidate which the reference has no counterpart of, what it holds, and why.

    A value without axes fills all of it.
    """

    module: str
    value: float | Tensor
    reason: str

    def to_module(self, disk: Tensors) -> Tensors:
        return {self.module: torch.as_tensor(self.value, dtype=torch.float64)}

    def to_disk(self, module: Tensors) -> Tensors:
        module.pop(self.module, None)
        return {}


@dataclass(frozen=True)
class Whole:
    """The candidate's whole state dict, made by a function of all of the reference's tensors.

    Gradients go back through the function itself.
    """

    function: Callable[[Tensors], Mapping[str, Tensor]]
    reference: Mapping[str, Tensor] = field(repr=False)

    def to_module(self, disk: Tensors) -> Tensors:
        given = dict(disk)
        disk.clear()
        return dict(self.function(given))

    def to_disk(self, module: Tensors) -> Tensors:
        dtype = next((value.dtype for value in module.values()), torch.float64)
        floats = {name: value for name, value in self.reference.items() if value.is_floating_point()}
        with torch.enable_grad():
            leaves = {name: value.detach().to(dtype).requires_grad_() for name, value in floats.items()}
            made = {
                name: value for name, value in self.function({**self.reference, **leaves}).items() if name in module
            }
            moving = [name for name, value in made.items() if value.requires_grad]
            found = torch.autograd.grad(
                [made[name] for name in moving],
                list(leaves.values()),
                [module[name] for name in moving],
                allow_unused=True,
                materialize_grads=True,
            )
        module.clear()
        return dict(zip(leaves, found, strict=True))


def describe(rule: Rule) -> str:
    """One rule in one line, the reference's name first."""
    match rule:
        case Same(disk, module):
            return f"{disk} -> {module}"
        case Transposed(disk, module):
            return f"{disk} -> {module}, transposed"
        case Split(disk, module, sizes, dim):
            return f"{disk} -> {', '.join(module)}: split {'+'.join(map(str, sizes))} along axis {dim}"
        case Stacked(disk, module):
            return f"{_first_last(disk)} -> {module}: stacked"
        case Permuted(disk, module, _, dim):
            return f"{disk} -> {module}, {'columns' if dim else 'rows'} permuted"
        case Turned(Split(disk, module, _, dim)):
            return f"{', '.join(module)} -> {disk}: joined along axis {dim}"
        case Turned(Stacked(disk, module)):
            return f"{module} -> {_first_last(disk)}: unstacked"
        case Ignored(disk, reason):
            return f"{disk} is ignored: {reason}"
        case Own(module, value, reason):
            return f"{module} is the candidate's own: {_shown(value)}, as {reason}"
        case Whole(function, _):
            return f"all tensors by {getattr(getattr(function, 'func', function), '__name__', 'a function')}"
    return repr(rule)


def _first_last(names: Sequence[Any]) -> str:
    first, last = (name if isinstance(name, str) else " above ".join(name) for name in (names[0], names[-1]))
    return first if len(names) == 1 else f"{first} ... {last}"


def _shown(value: float | Tensor) -> str:
    return f"{list(value.shape)} computed" if isinstance(value, Tensor) and value.ndim else f"{float(value):g}"


def as_toml(rules: Iterable[Rule]) -> str:
    """Rules as a file that can be read back; permutations by their order."""
    return "\n".join(_table(rule) for rule in rules)


def _table(rule: Rule) -> str:
    match rule:
        case Same(disk, module):
            return _entry("same", disk, module)
        case Transposed(disk, module):
            return _entry("transposed", disk, module)
        case Split(disk, module, sizes, dim):
            return _entry("split", disk, list(module), dim=dim, sizes=list(sizes))
        case Stacked(disk, module) if isinstance(disk[0], str):
            return _entry("stacked", list(disk), module)
        case Permuted(disk, module, order, dim):
            return _entry("permuted", disk, module, order=list(order), **({"dim": dim} if dim else {}))
        case Turned(Split(disk, module, _, dim)):
            return _entry("joined", list(module), disk, dim=dim)
        case Turned(Stacked(disk, module)) if isinstance(disk[0], str):
            return _entry("unstacked", module, list(disk))
        case Turned(Stacked(disk, module)):
            return _entry("unstacked", module, [list(names) for names in disk])
        case Stacked(disk, module):
            return _entry("stacked", [list(names) for names in disk], module)
        case Ignored(disk, reason):
            return _entry("ignored", disk, None, reason=reason)
        case Own(module, value, reason) if not isinstance(value, Tensor) or not value.ndim:
            return _entry("own", None, module, value=float(value), reason=reason)
    return f"# {describe(rule)}"


def _entry(kind: str, source: Any, target: Any, **rest: Any) -> str:
    named = {"from": source, "to": target}
    fields = {name: value for name, value in named.items() if value is not None} | rest
    return "\n".join([f"[[{kind}]]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items()), ""])
