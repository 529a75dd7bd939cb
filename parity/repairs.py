"""Repairs: what to do to a candidate's weights so that it computes what the reference computes.

Nothing is known of the family. What may be heads, packed projections or gates follows from shapes alone; layers that
bear a number are repaired alike. A repair is a line of code. It is tried as it is printed: the candidate runs with the
weights that the line leaves, and the repair is a fix if the outputs are then the reference's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations, product
from math import isqrt

import torch
from torch import Tensor

from parity import weights as helpers
from parity.compare import Record, Unequal, judge
from parity.weights import of

Weights = Mapping[str, Tensor]
Run = Callable[[Weights], Record]

MOST_HEADS, WIDEST_HEAD = 128, 256
F64 = torch.float64


@dataclass(frozen=True)
class Repair:
    """A transformation of weights.

    Attributes:
        what: it does, as a person would say it.
        line: code to paste, where `weights` is the state dict; it uses the functions of `parity.weights`.
        whole: whether the cache is right then, too, and not the outputs alone.
    """

    what: str
    line: str
    whole: bool = True

    def __str__(self) -> str:
        kept = "" if self.whole else "   (outputs are right then; what is cached keeps an order of its own)"
        return f"{self.what}, by parity.weights: {self.line}{kept}"

    def applied(self, weights: Weights) -> dict[str, Tensor]:
        """All weights, as the line leaves them."""
        space = {**vars(helpers), "torch": torch, "weights": dict(weights)}
        exec(self.line, space)
        return space["weights"]


@dataclass(frozen=True)
class Projection:
    """The matrix of one module, or of those with another number in their names; of experts, a stack of them."""

    module: str
    shape: tuple[int, ...]
    by_columns: bool = False  # stored [in, out]

    @property
    def rows(self) -> int:
        """The number of its outputs."""
        return self.shape[-1 if self.by_columns else -2]

    @property
    def inputs(self) -> int:
        """The number of its inputs."""
        return self.shape[-2 if self.by_columns else -1]

    def permuted(self, call: str, inputs: bool = False) -> str:
        """An expression for its tensors with their outputs, or their inputs, as a call on rows `{}` leaves them."""
        if inputs:
            return f"w if w.ndim == 1 else {self._along(call, by_columns=not self.by_columns)}"
        along = self._along(call, self.by_columns)
        return f"{call.format('w')} if w.ndim == 1 else {along}" if self.by_columns else along

    def _along(self, call: str, by_columns: bool) -> str:
        if len(self.shape) == 3:
            return f"torch.stack([{call.format('each')} for each in w])"
        return call.format("w.mT") + ".mT" if by_columns else call.format("w")


def find(
    weights: Weights,
    run: Run,
    truth: Record,
    *,
    within: str = "",
    confirm: Callable[[Repair], bool] = lambda repair: True,
    on_try: Callable[[], None] = lambda: None,
) -> Repair | None:
    """The simplest repair under which the candidate is right; one that mends the cache, too, if there is any.

    Args:
        weights: those that the candidate is loaded with, by its own names.
        run: what the candidate computes with given weights, in float64.
        truth: what it should compute.
        within: what the names of the modules hold whose weights are changed, where that is known.
        confirm: whether a repair holds elsewhere, too; by default it need not.
        on_try: called before every repair that is tried.
    """
    partly = None
    chosen = {name: tensor for name, tensor in weights.items() if within in name} or weights
    for repair in _repairs(chosen, weights, run, truth):
        on_try()
        try:
            repaired = repair.applied(weights)
        except (RuntimeError, ValueError, LookupError):
            continue  # sizes that do not divide, or a counterpart that there is not
        wrong = wrong_verdicts(run, repaired, truth)
        if wrong is None or wrong - {"cache"} or (wrong and partly is not None):
            continue
        repair = replace(repair, whole=not wrong)
        if confirm(repair):
            if repair.whole:
                return repair
            partly = repair
    return partly


def wrong_verdicts(run: Run, weights: Weights, truth: Record) -> set[str] | None:
    """The verdicts that do not hold with given weights; None if the candidate cannot run with them."""
    try:
        return {each.quantity.verdict for each in judge(truth, run(weights), [], F64, "f64") if not each.holds}
    except (Unequal, RuntimeError, ValueError):
        return None


def projections(weights: Weights) -> list[Projection]:
    """All modules with a matrix, or with a stack of them; those that differ by a number in their names count once."""
    by_columns = any(_shows_columns(weights, name) for name in weights)
    found: dict[str, Projection] = {}
    for name, tensor in weights.items():
        module = name.rpartition(".")[0]
        if tensor.ndim in (2, 3) and module:
            square = tensor.shape[-1] == tensor.shape[-2] and f"{module}.bias" in weights
            columns = _shows_columns(weights, name) or (square and by_columns)
            found.setdefault(_role(module), Projection(_role(module), tuple(tensor.shape), columns))
    return list(found.values())


def _shows_columns(weights: Weights, name: str) -> bool:
    """Whether a bias shows that a matrix is stored [in, out]."""
    shape, bias = weights[name].shape, weights.get(f"{name.rpartition('.')[0]}.bias")
    return bias is not None and len(shape) == 2 and shape[0] != len(bias) == shape[1]


def _role(module: str) -> str:
    """What a module is called below the last number in its name."""
    return re.split(r"(?:^|\.)\d+\.", module)[-1]


def _repairs(chosen: Weights, weights: Weights, run: Run, truth: Record) -> Iterator[Repair]:
    parts = projections(chosen)
    flat = [part for part in parts if len(part.shape) == 2]
    yield from _swaps(chosen)
    yield from _transposes(parts)
    yield from _offsets(chosen)
    yield from _packings(parts)
    yield from _pairings(chosen, flat)
    yield from _head_orders(flat)
    yield from _head_counts(flat)
    yield from _factors(parts, weights, run, truth)


def _mapped(what: str, modules: Sequence[str], expression: str) -> Repair:
    """Every tensor w of some modules becomes what an expression says."""
    *most, last = modules
    listed = f"{', '.join(most)} and {last}" if most else last
    named = ", ".join(map(repr, modules))
    return Repair(f"{what} {listed}", f"weights |= {{name: {expression} for name, w in of(weights, {named}).items()}}")


def _swaps(weights: Weights) -> Iterator[Repair]:
    """Two modules of equal shapes: k and v, gate and up, two norms."""
    modules = dict.fromkeys(_role(name.rpartition(".")[0]) for name in weights)
    shapes = {module: [tuple(tensor.shape) for tensor in of(weights, module).values()] for module in modules}
    for one, other in combinations(shapes, 2):
        if shapes[one] == shapes[other] and not (one.endswith(other) or other.endswith(one)):
            yield Repair(f"swap {one} and {other}", f"weights |= swapped(weights, {one!r}, {other!r})")


def _transposes(parts: Sequence[Projection]) -> Iterator[Repair]:
    """Square matrices, one by one and all together."""
    square = [part.module for part in parts if part.shape[-1] == part.shape[-2]]
    for modules in [*([module] for module in square), *([square] if len(square) > 1 else [])]:
        yield _mapped("transpose", modules, "w.mT if w.ndim > 1 else w")


def _offsets(weights: Weights) -> Iterator[Repair]:
    """Gains that are counted from 0 on one side, and from 1 on the other."""
    gains = [name.rpartition(".")[0] for name, w in weights.items() if name.endswith(".weight") and w.ndim == 1]
    for what, sign in (("count from 1 the gains of", "-"), ("count from 0 the gains of", "+")):
        if modules := list(dict.fromkeys(map(_role, filter(None, gains)))):
            yield _mapped(what, modules, f"w {sign} 1 if name.endswith('weight') else w")


def _packings(parts: Sequence[Projection]) -> Iterator[Repair]:
    """Packed queries, keys and values per head or per block; gate and up by turns or one below the other."""
    for part in parts:
        if part.rows % 3 == 0:
            for heads, call in product(_divisors(part.rows // 3, MOST_HEADS), ("block_from_head", "head_from_block")):
                yield _mapped("reorder the packed rows of", [part.module], part.permuted(f"{call}({{}}, {heads})"))
        if part.rows % 2 == 0 and part.rows > 2:
            for call in ("halved_from_alternating", "alternating_from_halved", "other_half_first"):
                yield _mapped("reorder the rows of", [part.module], part.permuted(f"{call}({{}})"))


PAIRINGS = ("adjacent_from_half", "half_from_adjacent")


def _pairings(weights: Weights, flat: Sequence[Projection]) -> Iterator[Repair]:
    """Half and adjacent pairs: of two projections that read the same, as queries and keys do; then of one.

    Gains as wide as a head go with them, or stay.
    """
    couples = [couple for couple in combinations(flat, 2) if couple[0].inputs == couple[1].inputs]
    for group in (*couples, *((part,) for part in flat)):
        for width, call in product(_widths(group), PAIRINGS):
            expression = group[0].permuted(f"{call}({{}}, {width})")
            modules, gains = [part.module for part in group], _gains(weights, width)
            for together in ([*modules, *gains], modules) if gains else (modules,):
                yield _mapped("permute the rows of", together, expression)


def _gains(weights: Weights, width: int) -> list[str]:
    """Modules with one tensor of that length, and no matrix."""
    found = dict.fromkeys(_role(name.rpartition(".")[0]) for name, w in weights.items() if tuple(w.shape) == (width,))
    return [module for module in found if module and all(w.ndim == 1 for w in of(weights, module).values())]


def _head_orders(flat: Sequence[Projection]) -> Iterator[Repair]:
    """Query heads that read tiled key/value heads, or repeated ones: outputs of one matrix, inputs of another."""
    for q, o in product(flat, flat):
        if q is o or q.rows != o.inputs:
            continue
        for width in _divisors(q.rows, WIDEST_HEAD):
            for name in ("tiled_from_repeated", "repeated_from_tiled"):
                for kv_heads in _divisors(q.rows // width, MOST_HEADS)[:-1]:
                    call = f"{name}({{}}, {width}, {kv_heads})"
                    rows = _mapped("reorder the heads of", [q.module], q.permuted(call))
                    columns = _mapped("", [o.module], o.permuted(call, inputs=True))
                    yield Repair(f"{rows.what} and {o.module}", f"{rows.line}; {columns.line}")


def _head_counts(flat: Sequence[Projection]) -> Iterator[Repair]:
    """Rows that were permuted from one pairing to the other with the wrong number of heads."""
    for part in flat:
        for wrong, right in product(_widths([part]), repeat=2):
            for there, back in (PAIRINGS, PAIRINGS[::-1]):
                if wrong != right:
                    call = f"{there}({back}({{}}, {wrong}), {right})"
                    what = f"permute with {part.rows // right} heads instead of {part.rows // wrong} the rows of"
                    yield _mapped(what, [part.module], part.permuted(call))


def _factors(parts: Sequence[Projection], weights: Weights, run: Run, truth: Record) -> Iterator[Repair]:
    """A constant factor on one projection, or on the first of three that are packed into one."""
    for part in parts:
        ways = {"the weights of": "w * FACTOR", "the first third of": part.permuted("first_scaled({}, FACTOR)")}
        for what, expression in list(ways.items())[: 2 if part.rows % 3 == 0 else 1]:
            repair = partial(_scaling, part.module, what, expression)
            if factor := _root(_Residual(repair, weights, run, truth)):
                yield repair(factor)


def _scaling(module: str, what: str, expression: str, factor: float) -> Repair:
    return _mapped(f"multiply by {factor:.6g} {what}", [module], expression.replace("FACTOR", _written(factor)))


@dataclass(frozen=True)
class _Residual:
    """What is wrong with the outputs as a function of the binary logarithm of a factor."""

    repair: Callable[[float], Repair]
    weights: Weights
    run: Run
    truth: Record

    def __call__(self, log: float) -> Tensor | None:
        try:
            values = self.run(self.repair(2.0**log).applied(self.weights)).values
        except (RuntimeError, ValueError, Unequal):
            return None
        residuals = []
        for value, true, valid, quantity in zip(
            values, self.truth.values, self.truth.valid, self.truth.quantities, strict=True
        ):
            if quantity.verdict != "cache":
                difference = value.double() - true
                residuals.append((difference if valid is None else difference.where(valid, 0.0)).flatten())
        residual = torch.cat(residuals)
        return residual if bool(residual.isfinite().all()) else None


SEARCHED = [step / 2 for step in range(-8, 9)]  # logarithms of factors
STEPS = 12


def _root(residual: _Residual) -> float | None:
    """A factor that leaves nothing wrong: Gauss-Newton steps from the best of a coarse search."""
    coarse = {log: found for log in SEARCHED if (found := residual(log)) is not None}
    if 0.0 not in coarse:
        return None
    log = min(coarse, key=lambda each: float(coarse[each].norm()))
    now, width = coarse[log], 1e-4
    for _ in range(STEPS):
        beside = residual(log + width)
        slope = None if beside is None else (beside - now) / width
        if slope is None or not bool(slope.any()):
            return None
        step = float((slope @ now) / (slope @ slope))
        following = residual(log - step) if abs(step) < 1 else None
        if following is None or float(following.norm()) > 0.9 * float(now.norm()):
            break
        log, now, width = log - step, following, max(1e-8, min(width, abs(step)))
    return None if log == 0.0 else _simplified(2.0**log)


def _simplified(factor: float) -> float:
    """The root of a simple fraction, where the factor is one to nine digits."""
    simple = float(_square(factor)) ** 0.5
    return simple if abs(simple - factor) < 1e-9 * factor else factor


def _square(factor: float) -> Fraction:
    return Fraction(factor * factor).limit_denominator(4096)


def _written(factor: float) -> str:
    """A number as code, a root as a root."""
    square = _square(factor)
    if float(square) ** 0.5 != factor:
        return repr(factor)
    over, under = square.numerator, square.denominator
    if isqrt(over) ** 2 == over and isqrt(under) ** 2 == under:
        return repr(isqrt(over) / isqrt(under))
    return f"{under} ** -0.5" if over == 1 else f"{over} ** 0.5" if under == 1 else f"({over} / {under}) ** 0.5"


def _widths(parts: Sequence[Projection]) -> list[int]:
    """The widths that heads of all these projections can have: even, and of more than one pair."""
    shared = set.intersection(*(set(_divisors(part.rows, WIDEST_HEAD)) for part in parts))
    return sorted(width for width in shared if width % 2 == 0 and width > 2)


def _divisors(number: int, most: int) -> list[int]:
    """Those above 1, with the number itself if it is not too large."""
    return [each for each in range(2, min(number, most) + 1) if number % each == 0]
