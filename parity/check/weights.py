"""From the reference's tensors to the candidate's: by equal names, by inference, or by rules.

Inference reads names and shapes only, never values: whatever it proposes is printed, can be written down as a rules
file and corrected there. A rules file is TOML, with `*` for any part of a name:

    [[same]]        from = "q_proj.*"            to = "wq.*"
    [[transposed]]  from = "c_fc.weight"         to = "up.weight"
    [[split]]       from = "c_attn.weight"       to = ["q.weight", "k.weight", "v.weight"]   sizes = [36, 18, 18]
    [[joined]]      from = ["q.weight", "k.weight"]   to = "qk.weight"   dim = 0
    [[stacked]]     from = ["w.0", "w.1"]        to = "experts"
    [[unstacked]]   from = "experts"             to = ["w.0", "w.1"]
    [[permuted]]    from = "q_proj.weight"       to = "wq.weight"     order = "adjacent"     head_dim = 8
    [[ignored]]     from = "inv_freq"            reason = "computed"

or Python: a list `RULES` of rules of `reimpl.weights`, from the reference's names (`disk`) to yours (`module`), or a
function `rules(config, reference)` that returns such a list, or your whole state dict.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reimpl.rope import half_order
from reimpl.weights import Permuted, Rule, Same, Split, Stacked, Tensors, Transposed, WeightError, slots, take, to_disk

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
    return repr(rule)


def _first_last(names: Sequence[Any]) -> str:
    first, last = (name if isinstance(name, str) else " above ".join(name) for name in (names[0], names[-1]))
    return first if len(names) == 1 else f"{first} ... {last}"


def load_rules(path: str, load: Callable[[str], Any]) -> Any:
    """Rules from a TOML file, or a Python one through `load`.

    Returns:
        What `resolve` takes: a list of rules with patterns as read, or a function.

    Raises:
        WeightError: naming the file and what is wrong in it.
    """
    if not path.endswith(".toml"):
        return load(path)
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise WeightError(f"rules {path}: cannot be read ({reason})") from error
    except tomllib.TOMLDecodeError as error:
        raise WeightError(f"rules {path}: is no TOML ({error})") from error
    for kind, entries in tables.items():
        if kind not in FIELDS or not isinstance(entries, list):
            raise WeightError(f"rules {path}: no such rule as [[{kind}]]; known are {', '.join(FIELDS)}")
        for number, entry in enumerate(entries, 1):
            unknown, missing = set(entry) - FIELDS[kind], FIELDS[kind] - OPTIONAL - set(entry)
            if unknown or missing:
                wrong = f"has no field {min(unknown)!r}" if unknown else f"lacks {min(missing)!r}"
                raise WeightError(f"rules {path}: [[{kind}]] number {number} {wrong}; see {', '.join(FIELDS[kind])}")
    return tables


FIELDS: Mapping[str, set[str]] = {
    "same": {"from", "to"},
    "transposed": {"from", "to"},
    "split": {"from", "to", "dim", "sizes"},
    "joined": {"from", "to", "dim"},
    "stacked": {"from", "to"},
    "unstacked": {"from", "to"},
    "permuted": {"from", "to", "order", "head_dim", "dim"},
    "ignored": {"from", "reason"},
}
OPTIONAL = {"dim", "sizes", "head_dim"}


def expand(tables: Mapping[str, Sequence[Mapping[str, Any]]], theirs: Shapes, ours: Shapes) -> list[Rule]:
    """The rules of a TOML file for these tensors: one for every way in which the patterns fit.

    Raises:
        WeightError: for a pattern that fits no tensor of the reference, or an order that is unknown.
    """
    rules: list[Rule] = []
    for kind, entries in tables.items():
        for entry in entries:
            first = _flat(entry["from"])[0]
            matches = [match for name in theirs if (match := re.fullmatch(_pattern(first), name))]
            if not matches:
                raise WeightError(
                    f"[[{kind}]] from = {first!r}: the reference has no such tensor; it has {', '.join(theirs)}"
                )
            for match in matches:
                rules.append(_rule(kind, entry, partial(_filled, match.groups()), theirs, ours))
    return rules


def _flat(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [name for each in names for name in _flat(each)]


def _each(fill: Callable[[str], str], names: Any) -> Any:
    """A name, or tuples of names, with the parts filled in."""
    return fill(names) if isinstance(names, str) else tuple(_each(fill, name) for name in names)


def _pattern(name: str) -> str:
    return "(.*)".join(re.escape(part) for part in name.split("*"))


def _filled(parts: Sequence[str], name: str) -> str:
    for part in parts:
        name = name.replace("*", part, 1)
    return name


def _rule(kind: str, entry: Mapping[str, Any], fill: Callable[[str], str], theirs: Shapes, ours: Shapes) -> Rule:
    source, target = (_each(fill, entry.get(side, "")) for side in ("from", "to"))
    dim = entry.get("dim", 0)
    match kind:
        case "same":
            return Same(source, target)
        case "transposed":
            return Transposed(source, target)
        case "split":
            sizes = entry.get("sizes") or [_size(ours, name, dim, "candidate") for name in target]
            return Split(source, target, tuple(sizes), dim)
        case "joined":
            sizes = [_size(theirs, name, dim, "reference") for name in source]
            return Turned(Split(target, source, tuple(sizes), dim))
        case "stacked":
            return Stacked(source, target)
        case "unstacked":
            return Turned(Stacked(target, source))
        case "ignored":
            return Ignored(source, entry["reason"])
    return Permuted(source, target, _order(entry, _size(theirs, source, dim, "reference")), dim)


def _size(shapes: Shapes, name: str, dim: int, whose: str) -> int:
    if name not in shapes or len(shapes[name]) <= dim:
        raise WeightError(f"the {whose} has no tensor {name!r} with an axis {dim}; it has {', '.join(shapes)}")
    return shapes[name][dim]


def _order(entry: Mapping[str, Any], rows: int) -> tuple[int, ...]:
    """Row i of the candidate is row order[i] of the reference."""
    order, head_dim = entry["order"], entry.get("head_dim")
    if isinstance(order, list) and sorted(order) == list(range(rows)):
        return tuple(order)
    if order not in ("adjacent", "half") or not head_dim or rows % head_dim or head_dim % 2:
        raise WeightError(
            f"[[permuted]] from = {entry['from']!r}: order is {order!r}, but should be a list of all {rows} rows, or"
            " 'adjacent' (you rotate adjacent pairs, the reference halves) or 'half' (the other way round), with an"
            " even head_dim that divides them"
        )
    half = half_order(head_dim)
    head = half if order == "half" else half.argsort()
    return tuple((torch.arange(0, rows, head_dim)[:, None] + head).flatten().tolist())


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def wanted(module: nn.Module) -> Tensors:
    """What must be filled: every parameter once, under the first of its names."""
    parameters = {id(parameter) for parameter in module.parameters()}
    return {name: slot for name, slot in slots(module).items() if id(slot) in parameters}


def fill(
    module: nn.Module, reference: Mapping[str, Tensor], rules: Iterable[Rule], buffers: Iterable[str] = ()
) -> None:
    """Copy the reference's tensors into the candidate, all of them into all of its parameters; NaN stood there before.

    Args:
        buffers: names of the candidate's buffers that may be filled, too.

    Raises:
        WeightError: naming the tensor left over, not filled or of another shape, and the remedy.
    """
    room = slots(module)
    with torch.no_grad():
        for slot in wanted(module).values():
            slot.fill_(torch.nan if slot.is_floating_point() else 0)
        given = convert(reference, rules)
        own = {name: name for name in room}
        if left := [name for name in given if name not in own]:
            raise WeightError(
                f"tensor {_listed(left)} of the reference would be left over: the candidate has no such parameter."
                f" It has {_listed(list(room), 8)}; say with --weights rules.toml which one it becomes, or ignore it"
            )
        if missing := [name for name in wanted(module) if name not in given]:
            raise WeightError(
                f"parameter {_listed(missing)} of the candidate would not be filled: the reference has no such tensor."
                f" It has {_listed(list(reference), 8)}; say which one it is with --weights rules.toml"
            )
        for name, tensor in given.items():
            if tensor.shape != room[name].shape:
                turned = tensor.ndim == 2 and tensor.mT.shape == room[name].shape
                raise WeightError(
                    f"parameter {name!r} of the candidate has shape {tuple(room[name].shape)}, but the reference's"
                    f" tensor has {tuple(tensor.shape)}; "
                    + ("a [[transposed]] rule fits" if turned else "build the candidate from the sizes in the config")
                )
            room[name].copy_(tensor)


def convert(reference: Mapping[str, Tensor], rules: Iterable[Rule]) -> Tensors:
    """The candidate's tensors; one that no rule names keeps its name."""
    left: Tensors = dict(reference)
    converted: Tensors = {}
    for rule in rules:
        converted |= rule.to_module(left)
    return converted | left


def back(candidate: Mapping[str, Tensor], rules: Iterable[Rule]) -> Tensors:
    """The candidate's tensors, or their gradients, as those of the reference."""
    return to_disk(candidate, rules)


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


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
    return f"# {describe(rule)}"


def _entry(kind: str, source: Any, target: Any, **rest: Any) -> str:
    fields = {"from": source} | ({} if target is None else {"to": target}) | rest
    return "\n".join([f"[[{kind}]]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items()), ""])
