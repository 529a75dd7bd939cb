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
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

TRUTH_BOUND = 1e-12  # design: a correct port agrees with the lifted reference to 2e-15, a 30-layer model to 4e-15
RMS_FACTOR, MAX_FACTOR = 4.0, 8.0  # design: correct variants stayed below 2.3, any factor from 2 to 16 served
VERDICTS = ("output", "cache", "gradient", "routing", "precision", "side effects")


@dataclass(frozen=True)
class Quantity:
    """One tensor that both sides have: its name, the verdict it counts for, the step it belongs to."""

    name: str
    verdict: str
    step: int = 0

    def __str__(self) -> str:
        return self.name if self.step == 0 else f"{self.name} in step {self.step}"


@dataclass(frozen=True, eq=False)
class Choice:
    """What a router chose for each token of a call: all scores, [tokens, options], and the chosen, [tokens, chosen]."""

    scores: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Record:
    """What one side computed: the quantities, their values, which entries are defined (None: all), what was chosen."""

    quantities: list[Quantity]
    values: list[Tensor]
    valid: list[Tensor | None]
    choices: list[Choice] = field(default_factory=list)

    @cached_property
    def sizes(self) -> Tensor:
        """The rms, the largest and the number of the entries that are defined, [quantities, 3]."""
        sizes = []
        for value, valid in zip(self.values, self.valid, strict=True):
            value, count = value.detach().double(), value.numel()
            if valid is not None:
                value, count = value.where(valid, 0.0), int(valid.expand_as(value).sum())
            norm, largest = _norm(value[None])[:, 0].tolist()
            sizes.append((norm / max(count, 1) ** 0.5, largest, count))
        return torch.tensor(sizes, dtype=torch.float64)


@dataclass(frozen=True)
class Judgement:
    """A quantity's error beside what was allowed; all relative. Of choices also their number, and the near-ties."""

    quantity: Quantity
    dtype: str
    rms: float
    max: float
    allowed_rms: float
    allowed_max: float
    choices: int = 0
    near_ties: int = 0

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
    errors, sizes = _errors(truth, [candidate, *references]), truth.sizes
    scale = _scale(truth.quantities, sizes)
    errors = torch.where(errors == 0, 0.0, errors / scale)  # where the truth is zero throughout, any error is infinite
    ours, yards = errors[..., 0], errors[..., 1:]
    exact = dtype is torch.float64
    floor = TRUTH_BOUND if exact else torch.finfo(dtype).eps / 4
    yard = yards.amax(dim=-1).clamp(min=floor) if references else torch.full_like(ours, floor)
    vanishing = _vanishing(truth.quantities, sizes, scale[:, 0, 0], dtype)[:, None]
    yard = torch.where(vanishing, yard.amax(dim=0), yard)
    allowed = yard * torch.tensor([1.0, 1.0] if exact else [RMS_FACTOR, MAX_FACTOR], dtype=torch.float64)
    rows = torch.cat([ours, allowed], dim=1).tolist()
    return [Judgement(quantity, name, *row) for quantity, row in zip(truth.quantities, rows, strict=True)]


def _errors(truth: Record, runs: Sequence[Record]) -> Tensor:
    """The errors of every quantity, [quantities, (rms, max), runs]. What is not a number is infinitely wrong."""
    errors = []
    for index, (target, valid) in enumerate(zip(truth.values, truth.valid, strict=True)):
        difference = torch.stack([run.values[index].detach() for run in runs]).double().sub_(target.detach())
        errors.append(_norm(difference if valid is None else difference.where(valid, 0.0)))
    counts = truth.sizes[:, 2:].clamp(min=1).sqrt()
    stacked = torch.stack(errors).nan_to_num(nan=math.inf, posinf=math.inf)
    stacked[:, 0] /= counts
    return stacked


def _norm(tensors: Tensor) -> Tensor:
    """The Euclidean and the largest norm of each of several tensors, [2, tensors]."""
    flat = tensors.flatten(1)
    if flat.shape[1] == 0:
        return flat.new_zeros(2, len(flat))
    return torch.stack([torch.linalg.vector_norm(flat, dim=1), flat.abs().amax(dim=1)])  # the inf norm is far slower


def _gradients(quantities: Iterable[Quantity]) -> Tensor:
    return torch.tensor([quantity.verdict == "gradient" for quantity in quantities])


def _scale(quantities: Sequence[Quantity], sizes: Tensor) -> Tensor:
    """What errors are relative to, [quantities, 1, 1]: the truth's rms, for a gradient at least the module's."""
    scale, gradient = sizes[:, 0], _gradients(quantities)
    if gradient.any():
        squares, counts = (sizes[gradient, 0].square() * sizes[gradient, 2]).sum(), sizes[gradient, 2].sum()
        scale = torch.where(gradient, scale.clamp(min=(squares / counts).sqrt()), scale)
    return scale[:, None, None]


def _vanishing(quantities: Sequence[Quantity], sizes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Which gradients are zero to working precision beside the module's others."""
    return _gradients(quantities) & (sizes[:, 1] < torch.finfo(dtype).eps * scale)


def aligned(candidate: Record, truth: Record) -> Record:
    """The candidate's record in the order of the truth's.

    Raises:
        Unequal: naming what one side has and the other lacks.
    """
    if candidate.quantities == truth.quantities:
        return candidate
    index, wanted = {quantity: i for i, quantity in enumerate(candidate.quantities)}, set(truth.quantities)
    missing = [str(quantity) for quantity in truth.quantities if quantity not in index]
    extra = [str(quantity) for quantity in index if quantity not in wanted]
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
