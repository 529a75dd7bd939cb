"""The warm-up of the original paper, as torch's scheduler asks for it, also when training is taken up again."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import torch
from hypothesis import strategies as st
from torch import nn

from parity.compare import Judgement, Quantity, Record
from parity.compare import judge as hold_against
from parity.function import Function
from reimpl.schedule import warm_up


@dataclass(frozen=True)
class Training:
    """So many updates of a model of this width, interrupted after some; the groups' own rates beside the paper's."""

    size: int
    warmup: int
    updates: int
    interrupted: int
    rates: tuple[float, ...]


def judge(training: Training) -> list[Judgement]:
    """The rates with which every group of parameters was updated."""
    wanted = [[rate * float(formula(n, training)) for rate in training.rates] for n in range(1, training.updates + 1)]
    truth = torch.tensor(wanted, dtype=torch.float64)
    record = Record([Quantity("rate", "output")], [truth], [None])
    ours = torch.tensor(_rates(training), dtype=torch.float64)
    return hold_against(record, Record(record.quantities, [ours], [None]), [], torch.float64, "f64")


def formula(n: int, training: Training) -> Decimal:
    """Equation 3, to 28 digits."""
    step, warmup = Decimal(n), Decimal(training.warmup)
    return min(1 / step.sqrt(), step / (warmup * warmup.sqrt())) / Decimal(training.size).sqrt()


def _rates(training: Training) -> list[list[float]]:
    """Train, and after an interruption go on with a new optimiser and scheduler that read the states of the old."""
    optimizer, scheduler, seen = *_begin(training), []
    for update in range(training.updates):
        if update == training.interrupted:
            states = optimizer.state_dict(), scheduler.state_dict()
            optimizer, scheduler = _begin(training)
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def _begin(training: Training) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in training.rates])
    return optimizer, warm_up(optimizer, training.size, training.warmup)


FUNCTION = Function(
    "schedule",
    "the paper's learning rate at every update, for every group, also after an interruption",
    "reimpl.schedule.warm_up",
    "its formula, through torch.optim.lr_scheduler.LambdaLR",
    st.builds(
        Training,
        size=st.integers(1, 8192),
        warmup=st.integers(1, 40) | st.integers(1, 100_000),
        updates=st.integers(1, 60),
        interrupted=st.integers(0, 60),
        rates=st.lists(st.sampled_from((1.0, 0.5, 2.0)), min_size=1, max_size=3).map(tuple),
    ),
    judge,
)
