"""What is no layer: a function of ours beside one of torch, of another library, or of a paper, over drawn examples."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity.compare import Judgement, Quantity, Record, judge
from parity.family import FamilyError
from parity.runner import SETTINGS
from parity.scenario import DTYPES
from parity.tiny import draw
from reimpl.config import nearest


@dataclass(frozen=True)
class Function:
    """A function, or a few that belong together, and what they are held against.

    Attributes:
        name: how it is chosen and reported.
        sentence: what holds.
        ours: where it is, as it is imported.
        reference: what it must equal.
        examples: draws recipes, which are printed where one fails.
        judge: judges one of them.
    """

    name: str
    sentence: str
    ours: str
    reference: str
    examples: SearchStrategy[Any]
    judge: Callable[[Any], list[Judgement]]


@cache
def functions() -> dict[str, Function]:
    """All functions by name."""
    import parity.functions

    modules = [
        importlib.import_module(f"parity.functions.{module.name}")
        for module in pkgutil.iter_modules(parity.functions.__path__)
    ]
    return {module.FUNCTION.name: module.FUNCTION for module in modules}


def find(name: str) -> Function:
    """The function of that name.

    Raises:
        FamilyError: naming the functions there are.
    """
    if name not in functions():
        raise FamilyError(f"unknown function {name!r}{nearest(name, functions())}; known are {', '.join(functions())}")
    return functions()[name]


class Differs(AssertionError):
    """An example under which a function is not what it must equal."""

    def __init__(self, function: Function, example: Any, judgements: Sequence[Judgement]) -> None:
        self.function, self.example = function, example
        self.failed = [judgement for judgement in judgements if not judgement.holds]
        super().__init__(function.name)

    def __str__(self) -> str:
        sizes = ", ".join(f"{j.quantity} {j.error:.2g} of {j.allowed:.2g} {j.dtype}".rstrip() for j in self.failed)
        return f"{self.function.name} differs from {self.function.reference}: {sizes}\n  smallest  {self.example}"


@dataclass
class Outcome:
    """What the examples of a function have shown.

    Attributes:
        cases: examples judged.
        worst: per verdict, the judgement nearest to its allowance.
        seconds: wall time.
        difference: what failed, at the smallest example.
    """

    cases: int = 0
    worst: dict[str, Judgement] = field(default_factory=dict)
    seconds: float = 0.0
    difference: Differs | None = None

    def add(self, judgements: Iterable[Judgement]) -> None:
        """Count an example and keep the worst judgement per verdict."""
        self.cases += 1
        for judgement in judgements:
            known = self.worst.get(judgement.quantity.verdict)
            if judgement.judged and (known is None or judgement.ratio > known.ratio):
                self.worst[judgement.quantity.verdict] = judgement


def hold(function: Function, examples: int | None = None, seed: int | None = None, smallest: bool = True) -> Outcome:
    """Draw examples of a function and judge each; on a failure find the smallest that fails, or leave it at that."""
    outcome, start, profile = Outcome(), time.perf_counter(), settings()

    def holds(example: Any) -> None:
        judgements = function.judge(example)
        outcome.add(judgements)
        if not all(judgement.holds for judgement in judgements):
            raise Differs(function, example, judgements)

    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if smallest else [])]
    limited = settings(profile, max_examples=examples or profile.max_examples, phases=phases, **SETTINGS)
    drawn = limited(given(function.examples)(holds))
    if seed is not None or profile.derandomize:
        drawn = hypothesis_seed(seed or 0)(drawn)
    try:
        drawn()
    except Differs as difference:
        outcome.difference = difference
    outcome.seconds = time.perf_counter() - start
    return outcome


def same(name: str, ours: Any, theirs: Any, verdict: str = "output") -> Judgement:
    """Two values that must be equal, or two sequences: how many of their entries are not."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        wrong = sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
    else:
        wrong = int(ours != theirs)
    return Judgement(Quantity(name, verdict), "", wrong, wrong, 0, 0)


Differentiable = Callable[[Tensor], Tensor]
LOOKS = range(1, 9)


def differentiable(
    name: str, ours: Differentiable, theirs: Differentiable, x: Tensor, upstream: Tensor
) -> list[Judgement]:
    """Judge an output and its gradient in every dtype: float64 is the truth, the reference's own error the yardstick.

    Where that fails, the yardstick gets a second look: its errors when the input moves by a unit in the last place, or
    in that of 1 where it is smaller, which is one of e^x, as a single number may be right by luck. A bias is added to
    the output, so that a gradient which vanishes, as where a softmax saturates, is not measured against its own
    rounding.

    Args:
        x: the input, representable in every dtype.
        upstream: what the output is multiplied with before its sum is derived, of the output's shape.
    """

    def run(function: Differentiable, dtype: torch.dtype, look: int = 0) -> Record:
        units = draw.tokens(x.shape, 3, look, "units") - 1 if look else 0
        given, limits = x.to(dtype), torch.finfo(dtype)
        place = given.abs().clamp(1, limits.max) * limits.eps
        leaf = (given + units * place).to(dtype).detach().requires_grad_()
        output, bias = function(leaf), torch.zeros_like(upstream, dtype=dtype, requires_grad=True)
        gradients = torch.autograd.grad(((output + bias) * upstream.to(dtype)).sum(), [leaf, bias])
        values = [output.detach(), *gradients]
        names = [
            Quantity(name, "output"),
            *(Quantity(f"{what} of {name}", "gradient") for what in ("gradient", "bias")),
        ]
        return Record(names, [torch.atleast_1d(value) for value in values], [None] * len(names))

    truth, judgements = run(theirs, torch.float64), []
    for short, dtype in DTYPES.items():
        candidate, yardsticks = run(ours, dtype), [] if dtype is torch.float64 else [run(theirs, dtype)]
        judged = judge(truth, candidate, yardsticks, dtype, short)
        if yardsticks and not all(judgement.holds for judgement in judged):
            yardsticks += [run(theirs, dtype, look) for look in LOOKS]
            judged = judge(truth, candidate, yardsticks, dtype, short)
        judgements += judged
    return judgements
