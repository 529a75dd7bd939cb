"""What the error of a layer looks like: exact at first, growing, a constant ratio, only some rows, only in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from parity.case import Case
from parity.compare import TRUTH_BOUND, Record, Unequal, judge
from parity.family import Family
from parity.pair import Pair, forward, run_candidate, run_truth
from parity.scenario import Scenario

EXACT = 100 * TRUTH_BOUND  # far above rounding, and far below a mistake of which something is to be told
GROWS = 0.9  # rank correlation of error and position
MORE = 8  # tokens by which chunks are made longer
F64 = torch.float64


def tellings(scenario: Scenario, family: Family) -> Iterator[Scenario]:
    """The scenario with longer chunks, with a longer first chunk, as far as there are positions, and itself.

    A smallest scenario is the last place in which to see something grow, or to tell one number from another.
    """
    first, *rest = scenario.schedule
    added = MORE * max(scenario.columns, 1)
    schedules = (tuple(chunk + added for chunk in scenario.schedule), (first + added, *rest))
    for schedule in schedules if family.tokens is None else ():
        more = sum(schedule) - scenario.length
        packing = scenario.packing and (*scenario.packing[:-1], scenario.packing[-1] + more)
        longer = replace(scenario, schedule=schedule, packing=packing)
        if family.positions is None or scenario.offset + longer.length <= family.positions:
            yield longer
    yield scenario


def describe(pair: Pair, cases: Iterable[Case]) -> tuple[str, ...]:
    """What can be said of the outputs in float64, as short phrases, in the first of the cases which shows an error."""
    return next(filter(None, (tuple(_patterns(pair, case)) for case in cases)), ())


def _patterns(pair: Pair, case: Case) -> Iterator[str]:
    truth = run_truth(pair, case, forward)
    try:
        candidate = run_candidate(pair, case, forward, F64)
        wrong = {j.quantity.verdict for j in judge(truth, candidate, [], F64, "f64") if not j.holds}
    except Unequal:
        return
    if wrong == {"cache"}:
        yield "exact"
    if "output" in wrong:
        yield from _of_outputs(pair, case, _outputs(candidate), _outputs(truth))


def _outputs(record: Record) -> Tensor:
    """All that the steps returned of tokens, [rows, tokens, channels]; else of rows, as if each had one token.

    The tokens of an image are its pixels.
    """
    outputs = [
        (quantity.name, value.flatten(2).mT if value.ndim == 4 else value)
        for quantity, value in zip(record.quantities, record.values, strict=True)
        if quantity.verdict == "output"
    ]
    by_token = any(value.ndim > 2 for _, value in outputs)
    of_name: dict[str, list[Tensor]] = {}
    for name, value in outputs:
        if value.ndim > 2 or not by_token:
            of_name.setdefault(name, []).append(value if by_token else value[:, None])
    return torch.cat([torch.cat(values, dim=1) for values in of_name.values()], dim=-1)


def _of_outputs(pair: Pair, case: Case, ours: Tensor, theirs: Tensor) -> Iterator[str]:
    valid = torch.ones(ours.shape[:2], dtype=torch.bool) if case.valid is None else case.valid
    wrong = errors_of(ours, theirs, valid) > EXACT
    if not wrong.any():
        return
    yield from by_token(errors_of(ours, theirs, valid), valid)
    yield from _by_row(case, wrong.any(dim=1))
    if len(case.steps) > 1 and not errors_of(_in_one_pass(pair, case), theirs, valid).gt(EXACT).any():
        yield "exact in one pass over all tokens"
    yield from by_number(ours[valid], theirs[valid])


def by_number(ours: Tensor, theirs: Tensor) -> Iterator[str]:
    """What is true of all numbers of the outputs of valid tokens, [tokens, channels]."""
    ratio = (ours * theirs).sum() / theirs.square().sum()
    if (ours - ratio * theirs).square().mean().sqrt() <= EXACT * ours.square().mean().sqrt():
        yield f"{ratio.item():.6g} times what they should be"
    elif torch.allclose(ours.sort(-1).values, theirs.sort(-1).values, rtol=EXACT, atol=EXACT):
        yield "the right numbers in another order"


def errors_of(ours: Tensor, theirs: Tensor, valid: Tensor) -> Tensor:
    """The error of every token, [rows, tokens], relative to the truth's root mean square; 0 where it is padding."""
    errors = (ours - theirs).square().mean(dim=-1).sqrt() / theirs[valid].square().mean().sqrt()
    return errors.nan_to_num(nan=torch.inf).masked_fill(~valid, 0)


def _in_one_pass(pair: Pair, case: Case) -> Tensor:
    scenario = case.scenario
    return _outputs(run_candidate(pair, pair.case(replace(scenario, schedule=(scenario.length,))), forward, F64))


def by_token(errors: Tensor, valid: Tensor) -> Iterator[str]:
    """By the number of valid tokens before each."""
    before = valid.cumsum(dim=1) - 1
    of_token = torch.stack([errors[valid & (before == n)].amax() for n in range(int(before.max()) + 1)])
    first = int((of_token > EXACT).nonzero()[0])
    if first:
        yield "exact at the first token" if first == 1 else f"exact at the first {first} tokens"
    rest = of_token[first:]
    if len(rest) >= MORE and torch.corrcoef(torch.stack([_ranks(rest), _ranks(torch.arange(len(rest)))]))[0, 1] > GROWS:
        yield "further off with position"


def _ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def _by_row(case: Case, wrong: Tensor) -> Iterator[str]:
    if case.valid is not None:
        plain = case.valid.all(dim=1)
        if plain.any() and not wrong[plain].any():
            yield "exact in rows without padding"
    first = torch.arange(len(wrong)) % case.scenario.batch == 0
    if case.scenario.batch > 1 and len(wrong) == case.scenario.rows and not wrong[first].any():
        yield "exact in the first row"
