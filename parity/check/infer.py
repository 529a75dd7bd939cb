"""Which tensor of the candidate is which of the reference's, told from names, shapes and order; never from values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from parity.check.rules import Shapes, Turned
from reimpl.weights import Rule, Same, Split, Stacked, Transposed, WeightError

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("q", "wq", "query", "queries", "toq", "linearq", "qlin"), "q"),
    **dict.fromkeys(("k", "wk", "key", "keys", "tok", "linearkeys", "klin"), "k"),
    **dict.fromkeys(("v", "wv", "value", "values", "tov", "vlin"), "v"),
    **dict.fromkeys(("o", "wo", "out", "output", "dense", "toout", "outlin", "ocproj"), "o"),
    **dict.fromkeys(("gate", "w1", "fc1gate", "router"), "gate"),
    **dict.fromkeys(("up", "w3", "fc1", "fcin", "wi", "lin1"), "up"),
    **dict.fromkeys(("down", "w2", "fc2", "fcout", "lin2"), "down"),
    **dict.fromkeys(("gamma", "scale", "gain", "weight", "w", "kernel"), "weight"),
    **dict.fromkeys(("beta", "shift", "bias", "b"), "bias"),
    **dict.fromkeys(("norm", "layernorm", "rmsnorm", "ln"), "norm"),
    **dict.fromkeys(("attn", "attention", "selfattn", "selfattention", "self", "mha"), "attention"),
    **dict.fromkeys(("mlp", "ffn", "ff", "feedforward"), "mlp"),
    **dict.fromkeys(("embed", "embedding", "embeddings", "wte", "tok"), "embed"),
}
NOISE = {"proj", "projection", "linear", "layer", "lin", "model", "net", "module"}


@dataclass(frozen=True)
class Guess:
    """A rule, the tensors it uses up and those it fills, and whether something else would have fitted as well."""

    rule: Rule
    used: tuple[str, ...]
    filled: tuple[str, ...]
    sure: bool = True


MOST = 4  # tensors that are joined into one


def infer(theirs: Shapes, ours: Shapes) -> list[Guess]:
    """Rules that fill every tensor of the candidate with all of the reference's; equal names and shapes need none.

    Raises:
        WeightError: naming what is left on both sides.
    """
    equal = {name for name in theirs if name in ours and tuple(theirs[name]) == tuple(ours[name])}
    left = {name: tuple(shape) for name, shape in theirs.items() if name not in equal}
    room = {name: tuple(shape) for name, shape in ours.items() if name not in equal}
    guesses: list[Guess] = []
    for step in (_alike, _as_many, _stacked, _joined, _split, _fitting):
        for guess in step(left, room):
            guesses.append(guess)
            for name in guess.used:
                del left[name]
            for name in guess.filled:
                del room[name]
    if left or room:
        raise WeightError(_unmatched(left, room))
    return guesses


def _alike(left: Shapes, room: Shapes, least: float = 0.3) -> Iterator[Guess]:
    """One tensor each, of one shape or turned, whose names have something in common; the most alike first."""
    pairs = [
        (similarity(theirs, ours) - 0.1 * (tuple(left[theirs]) != tuple(room[ours])), theirs, ours)
        for theirs in left
        for ours in room
        if tuple(left[theirs]) == tuple(room[ours]) or _turned(left[theirs], room[ours])
    ]
    place = {name: i / max(len(names), 1) for names in (left, room) for i, name in enumerate(names)}
    pairs.sort(key=lambda pair: (-pair[0], abs(place[pair[1]] - place[pair[2]])))
    used: set[str] = set()
    filled: set[str] = set()
    chosen = []
    for score, theirs, ours in pairs:
        if theirs not in used and ours not in filled and score >= least:
            used.add(theirs)
            filled.add(ours)
            others = [each for each, a, b in pairs if (a == theirs) != (b == ours)]
            chosen.append((theirs, ours, score > max(others, default=-1.0)))
    for theirs, ours, sure in chosen:
        kind = Same if tuple(left[theirs]) == tuple(room[ours]) else Transposed
        yield Guess(kind(theirs, ours), (theirs,), (ours,), sure)


def _as_many(left: Shapes, room: Shapes) -> Iterator[Guess]:
    """What is of a shape of which both sides have equally many."""
    theirs, ours = [tuple(shape) for shape in left.values()], [tuple(shape) for shape in room.values()]
    even = {shape for shape in theirs if theirs.count(shape) == ours.count(shape)}
    return _fitting(*({name: shape for name, shape in side.items() if tuple(shape) in even} for side in (left, room)))


def _fitting(left: Shapes, room: Shapes) -> Iterator[Guess]:
    """What is left, by shape and order alone."""
    return _alike(left, room, least=-1.0)


def _turned(shape: Sequence[int], other: Sequence[int]) -> bool:
    return len(shape) == 2 and tuple(shape) == tuple(other)[::-1]


def _stacked(left: Shapes, room: Shapes) -> Iterator[Guess]:
    """Several tensors that differ in a number of their name only, as experts do, and one with an axis more."""
    for theirs, groups in _stacks(left, room):
        names = tuple(name for group in groups for name in group)
        yield Guess(Turned(Stacked(groups if len(groups[0]) > 1 else names, theirs)), (theirs,), names)
    for ours, groups in _stacks(room, left):
        names = tuple(name for group in groups for name in group)
        yield Guess(Stacked(groups if len(groups[0]) > 1 else names, ours), names, (ours,))


def _stacks(whole: Shapes, parts: Shapes) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    """Each tensor of three axes with the names of its slices, of one or of two tensors, one above the other."""
    series: dict[str, list[str]] = {}
    for name in parts:
        series.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    for name, shape in list(whole.items()):
        if len(shape) != 3:
            continue
        numbered = [each for each in series.values() if len(each) == shape[0]]
        options = [(each,) for each in numbered] + [(a, b) for a in numbered for b in numbered if a is not b]
        fitting = [
            option
            for option in options
            if (sum(parts[each[0]][0] for each in option), *parts[option[0][0]][1:]) == tuple(shape[1:])
            and all(tuple(parts[each[0]][1:]) == tuple(shape[2:]) for each in option)
            and len({parts[each[0]][0] for each in option}) == 1
        ]
        if fitting:
            best = max(fitting, key=lambda option: _likeness(name, [each[0] for each in option]))
            for each in best:
                series = {key: names for key, names in series.items() if names is not each}
            yield name, tuple(zip(*best, strict=True))


def _joined(left: Shapes, room: Shapes) -> Iterator[Guess]:
    """Several tensors of the reference in one of the candidate's."""
    for ours, parts, dim in _joins(room, left):
        sizes = tuple(left[part][dim] for part in parts)
        yield Guess(Turned(Split(ours, parts, sizes, dim)), parts, (ours,))


def _split(left: Shapes, room: Shapes) -> Iterator[Guess]:
    """One tensor of the reference in several of the candidate's."""
    for theirs, parts, dim in _joins(left, room):
        sizes = tuple(room[part][dim] for part in parts)
        yield Guess(Split(theirs, parts, sizes, dim), (theirs,), parts)


def _joins(whole: Shapes, parts: Shapes) -> Iterator[tuple[str, tuple[str, ...], int]]:
    taken: set[str] = set()
    for name, shape in list(whole.items()):
        options = []
        for dim in range(len(shape)):
            rest = (*shape[:dim], *shape[dim + 1 :])
            fitting = [
                part
                for part, other in parts.items()
                if part not in taken and len(other) == len(shape) and (*other[:dim], *other[dim + 1 :]) == rest
            ][: 4 * MOST]
            options += [
                (chosen, dim)
                for count in range(2, MOST + 1)
                for chosen in combinations(fitting, count)
                if sum(parts[part][dim] for part in chosen) == shape[dim]
            ]
        if options:
            chosen, dim = max(options, key=lambda option: _likeness(name, option[0]))
            taken |= set(chosen)
            yield name, tuple(sorted(chosen, key=_by_role)), dim


ROLES = ("q", "k", "v", "gate", "up")


def _by_role(name: str) -> int:
    """Queries, keys, values and gates, ups stand in this order wherever they are joined; others as they come."""
    return next((i for i, role in enumerate(ROLES) if role in words(name)), len(ROLES))


def _likeness(name: str, parts: Sequence[str]) -> float:
    """How much like one thing some tensors are: parts of one module, with roles that the whole's name holds, too."""
    roles = [role for part in parts for role in ROLES if role in words(part)]
    own = "".join(words(name))
    named = sum(role in own for role in roles)
    alike = sum(similarity(name, part) for part in parts) / len(parts)
    return alike + 0.5 * named + 0.25 * (len(roles) == len(parts))


def words(name: str) -> list[str]:
    """The words of a name in one spelling, `q` for `wq`, `query` and `to_q`; those that say nothing left out."""
    split = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    found = []
    for part in split.split("."):
        joined = part.replace("_", "")
        pieces = [joined] if joined in SYNONYMS or joined in NOISE else part.split("_")
        found += [SYNONYMS.get(piece, piece) for piece in pieces if piece and piece not in NOISE]
    return found


def similarity(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1; numbers in them must agree, and so must `weight` and `bias`."""
    a, b = words(one), words(other)
    if [word for word in a if word.isdigit()] != [word for word in b if word.isdigit()]:
        return 0.0
    if ("bias" in a) != ("bias" in b):
        return 0.0
    a, b = ([word for word in each if word not in ("weight", "bias") and not word.isdigit()] for each in (a, b))
    if not a or not b:
        return 0.3
    common = sum(min(a.count(word), b.count(word)) for word in set(a))
    return common / max(len(a), len(b)) + 0.1 * (a[-1] == b[-1])


def _unmatched(left: Shapes, room: Shapes) -> str:
    def listed(shapes: Shapes) -> str:
        shown = [f"{name} {list(shape)}" for name, shape in list(shapes.items())[:6]]
        return ", ".join(shown) + (f" and {len(shapes) - 6} more" if len(shapes) > 6 else "") or "nothing"

    return (
        f"the candidate's weights cannot all be told from names and shapes: of the reference is left {listed(left)}; of"
        f" the candidate {listed(room)}; say with --weights rules.toml what becomes what, or what the candidate's own"
        " tensors hold ([[own]]), or build it with the same sizes and biases as in the config"
    )
