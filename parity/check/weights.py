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
    [[own]]         to = "gate"                  value = 1.0          reason = "starts as the identity"
    [[own]]         to = "table"                 from = "tables.py:table"      reason = "computed"

What no rule names is told by inference as without rules. `from` of an own tensor, which the reference has none of, is a
function that gets the reference's configuration and gives the tensor.

or Python: a list `RULES` of rules of `reimpl.weights`, from the reference's names (`disk`) to yours (`module`), or a
function `rules(config, reference)` that returns such a list, or your whole state dict. `Ignored` and `Own` are in
`parity.check.rules`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.check.rules import Ignored, Own, Shapes, Turned, Whole
from reimpl.rope import half_order
from reimpl.weights import Permuted, Rule, Same, Split, Stacked, Tensors, Transposed, WeightError, slots, to_disk


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
            needed = FIELDS[kind] - OPTIONAL - ({"from"} if "value" in entry else set())
            unknown, missing = set(entry) - FIELDS[kind], needed - set(entry)
            if unknown or missing:
                wrong = f"has no field {min(unknown)!r}" if unknown else f"lacks {min(missing)!r}"
                wrong += " or 'value'" * (kind == "own" and not unknown and min(missing) == "from")
                raise WeightError(f"rules {path}: [[{kind}]] number {number} {wrong}; see {', '.join(FIELDS[kind])}")
            for side in {"from", "to"} & set(entry):
                if not _flat(entry[side]) or not all(isinstance(name, str) for name in _flat(entry[side])):
                    raise WeightError(f"rules {path}: [[{kind}]] number {number}: {side} should be a name, or several")
            if kind == "own":
                entry["value"] = _own_value(f"rules {path}: [[own]] number {number}", entry, load)
    return tables


def _own_value(what: str, entry: Mapping[str, Any], load: Callable[[str], Any]) -> Any:
    """A number, or a function of the reference's configuration."""
    value = load(entry["from"]) if "from" in entry else entry["value"]
    if "from" in entry and not callable(value):
        raise WeightError(f"{what}: {entry['from']} is no function of the configuration")
    if "from" not in entry and not isinstance(value, int | float):
        raise WeightError(f"{what}: value is {value!r}, but should be a number; for others name a function with from")
    return value


FIELDS: Mapping[str, set[str]] = {
    "same": {"from", "to"},
    "transposed": {"from", "to"},
    "split": {"from", "to", "dim", "sizes"},
    "joined": {"from", "to", "dim"},
    "stacked": {"from", "to"},
    "unstacked": {"from", "to"},
    "permuted": {"from", "to", "order", "head_dim", "dim"},
    "ignored": {"from", "reason"},
    "own": {"to", "from", "value", "reason"},
}
OPTIONAL = {"dim", "sizes", "head_dim", "value"}


def expand(tables: Mapping[str, Sequence[Mapping[str, Any]]], theirs: Shapes, ours: Shapes, config: Any) -> list[Rule]:
    """The rules of a TOML file for these tensors: one for every way in which the patterns fit.

    Raises:
        WeightError: for a pattern that fits no tensor, or an order that is unknown.
    """
    rules: list[Rule] = []
    for kind, entries in tables.items():
        for entry in entries:
            if kind == "own":
                rules += _own(entry, ours, config)
                continue
            first = _flat(entry["from"])[0]
            matches = [match for name in theirs if (match := re.fullmatch(_pattern(first), name))]
            if not matches:
                raise WeightError(
                    f"[[{kind}]] from = {first!r}: the reference has no such tensor; it has {', '.join(theirs)}"
                )
            for match in matches:
                rules.append(_rule(kind, entry, partial(_filled, match.groups()), theirs, ours))
    return rules


def _own(entry: Mapping[str, Any], ours: Shapes, config: Any) -> list[Rule]:
    value = entry["value"](config) if callable(entry["value"]) else entry["value"]
    if not isinstance(value, int | float | Tensor):
        raise WeightError(f"[[own]] from = {entry['from']!r} gives a {type(value).__name__}, but should give a tensor")
    names = [name for name in ours if re.fullmatch(_pattern(entry["to"]), name)]
    if not names:
        raise WeightError(f"[[own]] to = {entry['to']!r}: the candidate has no such tensor; it has {', '.join(ours)}")
    return [Own(name, value, entry["reason"]) for name in names]


def explicit(given: Any, reference: Mapping[str, Tensor], ours: Shapes, config: Any) -> list[Rule]:
    """The rules that were given, whatever they were given as.

    Args:
        given: the tables of a file, a list of rules, a function, or None.

    Raises:
        WeightError: for rules that do not fit, or that are none.
    """
    if given is None:
        return []
    if callable(given):
        made = given(config, dict(reference))
        if isinstance(made, Mapping):
            return [Whole(partial(given, config), reference)]
        given = made
    if isinstance(given, Mapping):
        return expand(given, shapes_of(reference), ours, config)
    rules = list(given)
    if odd := [rule for rule in rules if not isinstance(rule, Rule)]:
        raise WeightError(f"rules: {odd[0]!r} is none; they are in reimpl.weights and parity.check.rules")
    return rules


def _flat(names: Any) -> list[Any]:
    return [name for each in names for name in _flat(each)] if isinstance(names, list | tuple) else [names]


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


def fill(module: nn.Module, reference: Mapping[str, Tensor], rules: Iterable[Rule]) -> None:
    """Copy the reference's tensors into the candidate, all of them into all of its parameters; NaN stood there before.

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
                f" It has {_listed(list(reference), 8)}; say with --weights rules.toml which one it is, or with an"
                " [[own]] rule what it holds"
            )
        for name, tensor in given.items():
            tensor = tensor.expand(room[name].shape) if tensor.ndim == 0 else tensor
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
