"""What the error of a mismatch looks like, in numbers to be plotted: over positions, heads, channels, and by size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.compare import Judgement, Quantity, Record, Unequal, worst
from parity.mismatch import MEASURED, Mismatch
from parity.pair import forward, gradients, pair_of, run_candidate, run_truth
from parity.patterns import tellings
from parity.scenario import DTYPES

POINTS = 1500  # of error against magnitude, at most
AXES = {
    ("output", 3): ("position", "channel"),
    ("output", 2): ("channel",),
    ("cache", 4): ("head", "position", "channel"),
}
OF_PARAMETER = ("row", "column")


@dataclass(frozen=True)
class Picture:
    """The error of one quantity, relative to the root mean square of the truth.

    Attributes:
        title: which quantity, in which dtype.
        profiles: along each axis, the root mean square over all others.
        field: over the last two axes, [rows, columns], with what they are called; nothing for a vector.
        magnitude: for some of the entries the size of the truth and that of the error.
    """

    title: str
    profiles: dict[str, list[float]]
    field: list[list[float]]
    names: tuple[str, str]
    magnitude: list[tuple[float, float]]


def picture(title: str, axes: Sequence[str], ours: Tensor, theirs: Tensor, valid: Tensor | None = None) -> Picture:
    """The picture of a quantity, [rows of the batch, *axes]; what is not `valid` counts as right."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    error = ours - theirs if valid is None else (ours - theirs).where(valid, 0.0)
    scale = theirs.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    error, theirs = (error / scale).nan_to_num(nan=torch.inf), theirs / scale
    first = error.ndim - len(axes)
    squares = error.square()
    profiles = {
        name: squares.mean(dim=[d for d in range(error.ndim) if d != first + i]).sqrt().tolist()
        for i, name in enumerate(axes)
    }
    field = squares.mean(dim=list(range(error.ndim - 2))).sqrt() if error.ndim > 2 else squares.sqrt()
    some = torch.linspace(0, error.numel() - 1, min(POINTS, error.numel())).long()
    sizes = torch.stack([theirs.flatten()[some].abs(), error.flatten()[some].abs()], dim=1)
    names = tuple(axes[-2:]) if len(axes) > 1 else ("row", axes[-1])
    return Picture(title, profiles, field.tolist(), (names[0], names[1]), [(a, b) for a, b in sizes.tolist()])


def pictures(mismatch: Mismatch) -> list[Picture]:
    """The worst quantity of every verdict, as far as one run of both sides in the smallest scenario shows it."""
    measured = [each for each in mismatch.failed if each.quantity.verdict in MEASURED]
    return [drawn for verdict in MEASURED if (drawn := _of_verdict(mismatch, verdict, measured)) is not None]


def _of_verdict(mismatch: Mismatch, verdict: str, measured: Sequence[Judgement]) -> Picture | None:
    failed = worst(each for each in measured if each.quantity.verdict == verdict)
    if failed is None:
        return None
    for ours, theirs, valid in _values(mismatch, failed):
        axes = AXES.get((verdict, theirs.ndim))
        if verdict == "gradient":
            is_input = failed.quantity.name == "gradient of input"
            axes = ("position", "channel") if is_input else OF_PARAMETER[-theirs.ndim :]
        if axes is not None and theirs.ndim >= len(axes):
            return picture(f"{failed.quantity}, {failed.dtype}", axes, ours, theirs, valid)
    return None


def _values(mismatch: Mismatch, failed: Judgement) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """A quantity of both sides, if they can be run once more and have it in the same shape."""
    measure = gradients if failed.quantity.verdict == "gradient" else forward
    pair = pair_of(mismatch.family.model_type, mismatch.layer.name, mismatch.smallest.config)
    longer = next(tellings(mismatch.smallest, mismatch.family))  # a smallest one has little to look at
    case = mismatch.prop.case(pair, longer)
    try:
        truth = run_truth(pair, case, measure)
        candidate = run_candidate(pair, case, measure, DTYPES[failed.dtype])
    except Unequal:
        return
    theirs, ours = _find(truth, failed.quantity), _find(candidate, failed.quantity)
    if theirs is not None and ours is not None and truth.values[theirs].shape == candidate.values[ours].shape:
        yield candidate.values[ours], truth.values[theirs], truth.valid[theirs]


def _find(record: Record, quantity: Quantity) -> int | None:
    return record.quantities.index(quantity) if quantity in record.quantities else None
