"""The one comparison: every quantity against the float64 truth, with the reference's own error as the yardstick.

In float64 the truth decides, to 1e-12. In a lower precision a quantity passes when its error against the truth is at
most a few times the error that the reference itself makes with any of its own implementations:

    rms error <= 4 * yard        max error <= 8 * yard_max        both yards at least eps / 4

Errors are relative to the root mean square of the truth; those of a gradient to no less than the root mean square of
all the module's gradients, so that one which is zero by structure is not measured against its own rounding. The
reference may even get such a zero exactly, as the sum of terms that cancel to the last bit; then its error in the
module's other gradients is the yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TRUTH_BOUND = 1e-12  # design: a correct port agrees with the lifted reference to 2e-15, a 30-layer model to 4e-15
RMS_FACTOR, MAX_FACTOR = 4.0, 8.0  # design: correct variants stayed below 2.3, any factor from 2 to 16 served
VERDICTS = ("output", "cache", "gradient", "precision", "side effects")


@dataclass(frozen=True)
class Quantity:
    """One tensor that both sides have: its name, the verdict it counts for, the step it belongs to."""

    name: str
    verdict: str
    step: int = 0

    def __str__(self) -> str:
        return self.name if self.step == 0 else f"{self.name} in step {self.step}"


@dataclass(frozen=True)
class Record:
    """What one side computed: the quantities, their values, and which entries are defined (None: all)."""

    quantities: list[Quantity]
    values: list[Tensor]
    valid: list[Tensor | None]


@dataclass(frozen=True)
class Judgement:
    """A quantity's error beside what was allowed; all relative."""

    quantity: Quantity
    dtype: str
    rms: float
    max: float
    allowed_rms: float
    allowed_max: float

    @property
    def ratio(self) -> float:
        """The error in units of what is allowed; 1 and less holds. NaN where the reference is not finite itself."""
        return max(_over(self.rms, self.allowed_rms), _over(self.max, self.allowed_max))

    @property
    def judged(self) -> bool:
        """False where the reference itself overflows, so that nothing can be said."""
        return math.isfinite(self.allowed_rms)

    @property
    def holds(self) -> bool:
        return not self.judged or self.ratio <= 1.0

    @property
    def error(self) -> float:
        """The error, by whichever measure is nearer to its allowance."""
        return self.rms if self._by_rms else self.max

    @property
    def allowed(self) -> float:
        return self.allowed_rms if self._by_rms else self.allowed_max

    @property
    def _by_rms(self) -> bool:
        return _over(self.rms, self.allowed_rms) >= _over(self.max, self.allowed_max)


def _over(error: float, allowed: float) -> float:
    """An error in units of its allowance; nothing can be said where the reference's own is not finite."""
    if error == 0 or not math.isfinite(allowed):
        return 0.0
    return error / allowed if allowed else math.inf


class Unequal(Exception):
    """The two sides cannot be held against each other: another number of tensors, another shape or dtype."""


def judge(
    truth: Record, candidate: Record, references: Sequence[Record], dtype: torch.dtype, name: str
) -> list[Judgement]:
    """Hold every quantity of the candidate against the truth, with the reference's own records as the yardstick.

    Raises:
        Unequal: if the sides do not have the same tensors.
    """
    candidate = aligned(candidate, truth)
    check_alike(candidate, references[0].values if references else truth.values)
    if not truth.values:
        return []
    lengths = torch.tensor([value.numel() for value in truth.values])
    target = _flat(truth.values)
    runs = torch.stack([_flat(candidate.values), *(_flat(record.values) for record in references)], dim=1)
    difference = (runs - target[:, None]).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
    count: Tensor = lengths
    if any(valid is not None for valid in truth.valid):
        defined = _flat_valid(truth)
        difference = torch.where(defined[:, None], difference, 0.0)
        target = torch.where(defined, target, 0.0)
        count = torch.segment_reduce(defined.double(), "sum", lengths=lengths)
    scale = _scale(truth.quantities, target, lengths, count)[:, None]
    rms = torch.segment_reduce(difference.square(), "sum", lengths=lengths, axis=0) / count.clamp(min=1)[:, None]
    rms = _relative(rms.sqrt(), scale)
    largest = _relative(torch.segment_reduce(difference, "max", lengths=lengths, axis=0), scale)
    floor = TRUTH_BOUND / RMS_FACTOR if dtype is torch.float64 else torch.finfo(dtype).eps / 4
    vanishing = _vanishing(truth.quantities, target, lengths, scale[:, 0], dtype)
    allowed_rms = RMS_FACTOR * _yard(rms, floor, vanishing)
    allowed_max = MAX_FACTOR * _yard(largest, floor, vanishing)
    columns = zip(*(c.tolist() for c in (rms[:, 0], largest[:, 0], allowed_rms, allowed_max)), strict=True)
    return [Judgement(q, name, *numbers) for q, numbers in zip(truth.quantities, columns, strict=True)]


def _yard(errors: Tensor, floor: float, vanishing: Tensor) -> Tensor:
    """The largest error of the references, per quantity; of all quantities, for those that vanish by structure."""
    if errors.shape[1] == 1:
        return torch.full_like(errors[:, 0], floor)
    yard = errors[:, 1:].amax(dim=1).clamp(min=floor)
    return torch.where(vanishing, yard.amax(), yard)


def _vanishing(
    quantities: Sequence[Quantity], target: Tensor, lengths: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Which gradients are zero to working precision beside the module's others."""
    gradient = torch.tensor([quantity.verdict == "gradient" for quantity in quantities])
    largest = torch.segment_reduce(target.abs(), "max", lengths=lengths)
    return gradient & (largest < torch.finfo(dtype).eps * scale)


def _relative(error: Tensor, scale: Tensor) -> Tensor:
    """An error in units of the truth; where the truth is zero throughout, any error at all is infinite."""
    return torch.where(error == 0, 0.0, error / scale)


def _scale(quantities: Iterable[Quantity], target: Tensor, lengths: Tensor, count: Tensor) -> Tensor:
    squares = torch.segment_reduce(target.square(), "sum", lengths=lengths)
    scale = (squares / count.clamp(min=1)).sqrt()
    gradient = torch.tensor([quantity.verdict == "gradient" for quantity in quantities])
    if not gradient.any():
        return scale
    whole = (squares[gradient].sum() / lengths[gradient].sum()).sqrt()
    return torch.where(gradient, scale.clamp(min=whole), scale)


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values]).double()


def _flat_valid(record: Record) -> Tensor:
    return torch.cat(
        [
            torch.ones(value.numel(), dtype=torch.bool) if valid is None else valid.expand_as(value).reshape(-1)
            for value, valid in zip(record.values, record.valid, strict=True)
        ]
    )


def aligned(candidate: Record, truth: Record) -> Record:
    """The candidate's record in the order of the truth's.

    Raises:
        Unequal: naming what one side has and the other lacks.
    """
    if candidate.quantities == truth.quantities:
        return candidate
    index = {quantity: i for i, quantity in enumerate(candidate.quantities)}
    missing = [str(quantity) for quantity in truth.quantities if quantity not in index]
    extra = [str(quantity) for quantity in index if quantity not in truth.quantities]
    if missing or extra:
        raise Unequal(f"the candidate lacks {_listed(missing)} and has {_listed(extra)} too many")
    order = [index[quantity] for quantity in truth.quantities]
    return Record(truth.quantities, [candidate.values[i] for i in order], [candidate.valid[i] for i in order])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def check_alike(candidate: Record, wanted: Sequence[Tensor]) -> None:
    """Refuse tensors of another shape or dtype than the reference's.

    Raises:
        Unequal: naming the first quantity that differs so.
    """
    for quantity, value, like in zip(candidate.quantities, candidate.values, wanted, strict=True):
        if value.shape != like.shape:
            raise Unequal(f"{quantity} has shape {tuple(value.shape)}, but should have {tuple(like.shape)}")
        if value.dtype != like.dtype:
            raise Unequal(f"{quantity} is {value.dtype}, but should be {like.dtype}")


def worst(judgements: Iterable[Judgement]) -> Judgement | None:
    """The judgement nearest to, or furthest beyond, what was allowed."""
    return max((j for j in judgements if j.judged), key=lambda j: j.ratio, default=None)
