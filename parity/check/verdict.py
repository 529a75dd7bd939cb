"""Judging recorded calls: the candidate against the truth, with the reference's own error as the yardstick."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from parity import routing
from parity.audit import audit, judge_precision
from parity.check import replay, tree
from parity.check.guest import Guest, values_of
from parity.check.record import Call
from parity.check.rules import Ignored
from parity.check.subject import Built
from parity.compare import Judgement, Quantity, Record, Unequal, judge
from parity.scenario import DTYPES
from parity.tiny import draw

DISTURBANCES = 12
NEAR = 32  # times the allowance, beyond which a second look at the yardstick is not worth its time


class Side(Protocol):
    """What is judged: a guest, or one that is given something else."""

    def forward(self, call: Call, truth: Record) -> tuple[Record, list[str]]: ...


def is_first(call: Call) -> bool:
    """Whether a call depends on none before it, so that gradients can be taken of it."""
    return not (call.step or call.cached)


def judged(built: Built, guest: Guest, call: Call, prop: str, name: str) -> list[Judgement]:
    """One property of a call in a dtype: `forward` or `gradients`.

    Raises:
        Unequal: see `judge_forward` and `judge_gradients`.
    """
    return (judge_gradients if prop == "gradients" else judge_forward)(built, guest, call, name)


def judge_forward(built: Built, guest: Side, call: Call, name: str) -> list[Judgement]:
    """Outputs, the whole cache after the call, choices of experts, and what was written to.

    Raises:
        Unequal: if the candidate raises, or returns what cannot be held against the truth.
    """
    truth, written = built.truth(call), []

    def run() -> Record:
        record, wrote = guest.forward(call, truth)
        written.extend(wrote)
        return record

    built.warm(call, DTYPES[name])
    candidate = routing.watched(run, {})
    judgements = _held(built, call, candidate, truth, name, "forward")
    wrong = [argument for argument in written if argument not in _writes(built, call)]
    return (
        judgements
        + [_written(argument, 1, name) for argument in wrong]
        + [_written("arguments", 0, name)] * (not wrong)
    )


def judge_gradients(built: Built, guest: Guest, call: Call, name: str) -> list[Judgement]:
    """Gradients of all arguments and parameters.

    Raises:
        Unequal: if the candidate cannot be differentiated.
    """
    outputs, truth = values_of(built.truth(call), "output"), built.truth(call, "gradients")
    built.warm(call, DTYPES[name])
    candidate = routing.watched(lambda: guest.gradients(call, outputs), {})
    ignored = {f"gradient of {rule.disk}" for rule in guest.rules if isinstance(rule, Ignored)}
    terms = built.gradients_on_disk if guest.on_disk else lambda record: record
    return _held(built, call, candidate, truth, name, "gradients", ignored, terms)


def judge_operations(built: Built, guest: Guest, call: Call, name: str) -> list[Judgement]:
    """Delicate operations run no coarser than the reference's."""
    dtype, truth = DTYPES[name], built.truth(call)
    modules = [built.module(dtype, way, call) for way in built.implementations]
    theirs = audit(lambda: [replay.forward(module, call, dtype) for module in modules])
    return judge_precision(audit(lambda: guest.replay(call, truth)), theirs, name)


def _held(
    built: Built,
    call: Call,
    candidate: Record,
    truth: Record,
    name: str,
    measure: str,
    ignored: Collection[str] = (),
    terms: Callable[[Record], Record] = lambda record: record,
) -> list[Judgement]:
    """What the candidate has, judged; truth and reference choose experts as the candidate did.

    Args:
        ignored: what the reference has, and the candidate need not have.
        terms: puts what the reference has into those of the candidate's weights.
    """
    dtype = DTYPES[name]
    told = routing.agreed(candidate, truth)
    if not routing.obeyed(truth, told):
        truth = _told(built, call, torch.float64, measure, told, "eager")
    truth = terms(truth)
    unjudged = [each for each in truth.quantities if each not in set(candidate.quantities) and each.name not in ignored]
    if measure == "gradients" and unjudged:
        raise Unequal(
            f"the candidate has no {unjudged[0]}, nor {len(unjudged) - 1} more; do its rules name every tensor?"
        )
    truth = of(candidate, truth)
    candidate = of(truth, candidate)
    yards: list[Record] = []
    if dtype is not torch.float64:
        yards = [of(truth, terms(_told(built, call, dtype, measure, told, way))) for way in built.implementations]
    judgements = _judge(call, truth, candidate, yards, name)
    if dtype is torch.float64 or all(judgement.ratio <= 1 or judgement.ratio > NEAR for judgement in judgements):
        return judgements
    moved = zip(range(DISTURBANCES), cycle(built.implementations), strict=False)
    yards += [of(truth, terms(_disturbed(built, call, dtype, measure, told, way, number))) for number, way in moved]
    return _judge(call, truth, candidate, yards, name)


def _judge(call: Call, truth: Record, candidate: Record, yards: Sequence[Record], name: str) -> list[Judgement]:
    judgements = judge(truth, candidate, yards, DTYPES[name], name)
    if truth.choices and candidate.choices:
        judgements += routing.judge_calls(partial(_tokens, call), truth, candidate, yards, DTYPES[name], name)
    return judgements


def _tokens(call: Call, number: int, calls: int, tokens: int) -> tuple[int, Tensor]:
    """The step of a router's call, and which of its tokens are no padding."""
    known = call.valid is not None and call.valid.numel() == tokens
    return call.step, call.valid.flatten() if known and call.valid is not None else torch.ones(tokens, dtype=torch.bool)


def _told(built: Built, call: Call, dtype: torch.dtype, measure: str, told: routing.Told, way: str) -> Record:
    built.warm(call, dtype)
    return routing.watched(partial(built.measured, built.module(dtype, way, call), call, dtype, measure), told)


def _disturbed(
    built: Built, call: Call, dtype: torch.dtype, measure: str, told: routing.Told, way: str, number: int
) -> Record:
    """The reference with every weight and input moved by at most one unit in the last place of a dtype."""
    module = built.module(dtype, way, call)
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            parameter.copy_(_moved(parameter, dtype, f"disturbance {number} of {parameter_name}"))

    def move(path: tree.Path, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or "mask" in replay.argument_name(path):
            return tensor.clone()
        return _moved(tensor, dtype, f"disturbance {number} at {path}")

    other = built.like(call, *tree.converted(call.given, move))
    return routing.watched(partial(built.measured, module, other, dtype, measure), told)


def _moved(value: Tensor, dtype: torch.dtype, stream: str) -> Tensor:
    steps = draw.tokens(tuple(value.shape), 3, 0, stream) - 1
    return (value.double() * (1 + torch.finfo(dtype).eps * steps)).to(value.dtype)


def of(wanted: Record, record: Record) -> Record:
    """The quantities of one record that another has, too."""
    names = set(wanted.quantities)
    kept = [i for i, quantity in enumerate(record.quantities) if quantity in names]
    if len(kept) == len(record.quantities):
        return record
    return Record(
        [record.quantities[i] for i in kept],
        [record.values[i] for i in kept],
        [record.valid[i] for i in kept],
        record.choices,
    )


def _written(argument: str, count: int, name: str) -> Judgement:
    return Judgement(Quantity(f"writes to {argument}", "side effects"), name, count, count, 0.0, 0.0)


def _writes(built: Built, call: Call) -> Sequence[str]:
    """The arguments that the reference itself writes to."""
    return replay.run(built.module(torch.float32, call=call), *replay.arguments(call, torch.float32)).written
