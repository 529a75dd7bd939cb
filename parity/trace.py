"""Where two implementations first part, without the candidate having to cooperate.

The reference is watched from outside (`parity.watch`). Of the candidate nothing is known, so every number that any of
its operations reads or produces is collected (`parity.collect`). A quantity of the reference is there if its numbers
are among them. That needs no names and no shapes: the candidate may split heads, fuse projections or transpose at will,
and in float64 two different numbers do not agree to twelve digits by chance. The first quantity to blame for a wrong
result (`parity.blame`) is where the two part. Gradients are traced alike, from the output back to inputs and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.blame import Chain, paths
from parity.candidate import Candidate
from parity.case import Case, Step
from parity.collect import Collect, Unfused
from parity.compare import Quantity, Unequal, judge
from parity.oracle import lifted
from parity.pair import (
    Measure,
    Pair,
    differentiate,
    forward,
    gradients,
    input_of,
    one_pass,
    run_candidate,
    run_truth,
    tables_of,
)
from parity.reference import Reference
from parity.watch import Name, Seen, Watch

F64 = torch.float64


@dataclass(frozen=True)
class Divergence:
    """The first quantity at which the two sides part, and the sentence that says so.

    `chain` holds what the reference forms on its way, where it is a run of both that tells.
    """

    quantity: Name
    where: str
    chain: Chain | None = None


@dataclass(frozen=True)
class Wrong:
    """The results that do not hold; only suspects, `sure` is False, where the candidate has none to hold against."""

    quantities: Sequence[Quantity]
    sure: bool = True


def locate(pair: Pair, case: Case, backward: bool = False) -> Divergence | None:
    """Find where the sides part in float64: in the forward or, if that is right and it is asked for, in the backward.

    Returns:
        None if all is right, so that they part in precision only, or not in one run of both.
    """
    wrong = _wrong(pair, case, forward)
    if wrong.quantities:
        return _locate_forward(pair, case, wrong)
    if not backward:
        return None
    wrong = _wrong(pair, case, gradients)
    return _locate_backward(pair, case, wrong) if wrong.quantities else None


def _wrong(pair: Pair, case: Case, measure: Measure) -> Wrong:
    truth = run_truth(pair, case, measure)
    try:
        judgements = judge(truth, run_candidate(pair, case, measure, F64), [], F64, "f64")
    except Unequal:
        return Wrong(truth.quantities, sure=False)
    return Wrong([judgement.quantity for judgement in judgements if not judgement.holds])


def _locate_forward(pair: Pair, case: Case, wrong: Wrong) -> Divergence | None:
    reference, candidate = _ready(pair, case)
    theirs, ours = (side.new_cache() if case.cached else None for side in (reference, candidate))
    tables = tables_of(reference, case)
    for step in case.steps:
        x = case.part(input_of(reference, case), step)
        watch, collect = Watch(), Collect(candidate.parameters.values())
        with torch.enable_grad(), lifted(), watch.on(reference, theirs):
            watch.note_results(reference(case, step, x, tables, theirs))
        with torch.no_grad(), collect, Unfused(), suppress(Exception):  # what it did before it broke off tells, too
            candidate(case, step, x, tables, ours)
        chain = Chain(
            [each.name for each in watch.seen],
            [_defined(each, case, step) for each in watch.seen],
            paths([each.value for each in watch.seen]),
            collect,
            whole=[_is_whole(each, case, step) for each in watch.seen],
        )
        names = [quantity.name for quantity in wrong.quantities if quantity.step == step.index]
        results = [i for i, each in enumerate(watch.seen) if each.result in names]
        if blamed := chain.blamed(results, wrong.sure):
            when = f" in step {step.index}" if step.index else ""
            return Divergence(chain.names[blamed[0]], chain.sentence(blamed, when), chain)
    return None


def _locate_backward(pair: Pair, case: Case, wrong: Wrong) -> Divergence | None:
    reference, candidate = _ready(pair, case)
    watch, collect = Watch(), Collect(candidate.parameters.values())
    with lifted(), watch.on(reference, None):
        inputs, results = one_pass(reference, case)
        leaves = reference.parameters | inputs
        given = {id(leaf) for leaf in leaves.values()}
        formed = [each for each in watch.seen if each.value.requires_grad and id(each.value) not in given]
        values = [*leaves.values(), *(each.value for each in formed)]
        found = differentiate(case, results, values)
    with collect, Unfused(), suppress(Exception):
        gradients(candidate, case)
    names = [*map(_name_of, leaves), *(each.name for each in formed)]
    names = [replace(name, name=f"gradient of {name.name}") for name in names]
    scale = torch.cat([gradient.flatten() for gradient in found[: len(leaves)]]).square().mean().sqrt().item()
    # From the output back to the leaves: the order and every path turned round.
    chain = Chain(names[::-1], found[::-1], paths(values).T.flip(0, 1), collect, scale)
    wanted = [quantity.name for quantity in wrong.quantities]
    ends = [(len(names) - 1 - i, leaf) for i, leaf in enumerate(leaves)]
    at = [i for i, leaf in ends if f"gradient of {leaf}" in wanted]  # none where a leaf has another name on disk
    blamed = chain.blamed(at or [i for i, _ in ends], wrong.sure and bool(at))
    return Divergence(chain.names[blamed[0]], chain.sentence(blamed), chain) if blamed else None


def _name_of(parameter: str) -> Name:
    """The name of a parameter within the module that holds its layer."""
    *owner, module, name = ["", *parameter.split(".")]
    return Name(f"{module}.{name}" if module else name, ".".join(filter(None, owner)))


def _ready(pair: Pair, case: Case) -> tuple[Reference, Candidate]:
    sides = pair.reference(F64), pair.candidate(F64)
    for side in sides:
        pair.ready(side, case.scenario.seed)
    return sides


def _is_whole(each: Seen, case: Case, step: Step) -> bool:
    """Whether a quantity is of all tokens: an expert's is not, nor is a pooler's."""
    return each.value.ndim != 2 or len(each.value) == case.scenario.rows * (step.stop - step.start)


def _defined(each: Seen, case: Case, step: Step) -> Tensor:
    """The rows of a quantity that belong to valid tokens."""
    value = each.value.detach()
    if case.valid is not None:
        valid = case.valid[:, case.first_key(step) if each.cached else step.start : step.stop]
        if value.ndim > each.axis and (len(value), value.shape[each.axis]) == valid.shape:
            value = value.movedim(each.axis, 1)[valid]
        elif len(value) == valid.numel():  # all tokens of all rows on one axis, as experts want them
            value = value[valid.flatten()]
        elif value.ndim == 2 and len(value) == len(valid):  # the first token of every row, as poolers want it
            value = value[valid[:, 0]]
    return value
