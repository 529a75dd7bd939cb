"""Comparing layers that route: the choice on its own, and values under the candidate's own choice.

A router takes the highest of several scores. Where two of them nearly tie, rounding decides, and with it a whole
expert: in bfloat16 one such flip makes the reference itself wrong by 0.2. So these are judged apart:

* The choice. By the truth, each score that was chosen must come as near to the k-th highest as rounding explains. Two
  scores are compared, and each may be off by four times the largest error that the reference makes in the scores of
  that token. A token for which another choice than the truth's is excused so is a near-tie, and counted.
* Values and gradients, with the truth and the reference made to choose as the candidate did.
* Values token by token, as one wrong expert on one token may drown among thousands of tokens.

Choices are seen from outside, wherever `torch.topk` picks among the scores of every token, and forced there, too. What
a candidate chooses by other means is not seen, so it has to be what the truth chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.case import Case, Step
from parity.compare import RMS_FACTOR, TRUTH_BOUND, Choice, Judgement, Quantity, Record, aligned

Told = Mapping[tuple[int, int], Sequence[Tensor]]
"""What is to be chosen, call by call, for every kind of choice: of so many options so many."""


@contextmanager
def watch(told: Told) -> Iterator[list[Choice]]:
    """Notes every choice that is made, or made as it is told, while the context lasts."""
    choices: list[Choice] = []
    remaining = {kind: iter(chosen) for kind, chosen in told.items()}
    original = torch.topk

    def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if input.ndim != 2 or k >= input.shape[1]:  # not one choice per token, or none at all
            return original(input, k, dim, largest, sorted)
        answers = remaining.get((input.shape[1], k))
        if answers is None:
            result = original(input, k, dim, largest, sorted)
        else:
            chosen = next(answers)
            result = torch.return_types.topk((input.gather(1, chosen), chosen))
        scores = input.detach()
        choices.append(Choice(scores if largest else -scores, result.indices))  # the highest wins
        return result

    # A TorchFunctionMode would see the same calls, and cost a quarter of all others.
    setattr(torch, "topk", topk)  # noqa: B010 (a type checker knows another signature)
    setattr(Tensor, "topk", topk)  # noqa: B010
    try:
        yield choices
    finally:
        setattr(torch, "topk", original)  # noqa: B010
        del Tensor.topk  # what it inherits is the original


def watched(run: Callable[[], Record], told: Told) -> Record:
    """What a side computes, and what its routers chose."""
    with watch(told) as choices:
        record = run()
    return replace(record, choices=choices)


def agreed(candidate: Record, truth: Record) -> Told:
    """The candidate's choices, by kind, as far as the reference makes as many of that kind for as many tokens."""
    told = {}
    for kind, choices in _by_kind(candidate).items():
        chosen = [choice.chosen for choice in choices]
        if [each.shape for each in chosen] == [each.chosen.shape for each in _by_kind(truth).get(kind, [])]:
            told[kind] = chosen
    return told


def obeyed(record: Record, told: Told) -> bool:
    """Whether a side chose as it would have been told, in whatever order."""
    return all(
        torch.equal(choice.chosen.sort().values, chosen.sort().values)
        for kind, all_chosen in told.items()
        for choice, chosen in zip(_by_kind(record)[kind], all_chosen, strict=True)
    )


def joined(record: Record, rows: int, steps: int) -> list[Choice]:
    """The choices of all steps as those of one pass over all tokens."""
    each = len(record.choices) // steps
    return [
        Choice(
            torch.cat([choice.scores.unflatten(0, (rows, -1)) for choice in calls], dim=1).flatten(0, 1),
            torch.cat([choice.chosen.unflatten(0, (rows, -1)) for choice in calls], dim=1).flatten(0, 1),
        )
        for calls in (record.choices[number::each] for number in range(each))
    ]


def judge(
    case: Case, truth: Record, candidate: Record, references: Sequence[Record], dtype: torch.dtype, name: str
) -> list[Judgement]:
    """Judge the choices, and outputs token by token. All sides but the candidate were told what it had chosen."""
    return judge_calls(partial(_tokens, case), truth, candidate, references, dtype, name)


def judge_calls(
    tokens_of: Callable[[int, int, int], tuple[int, Tensor]],
    truth: Record,
    candidate: Record,
    references: Sequence[Record],
    dtype: torch.dtype,
    name: str,
) -> list[Judgement]:
    """The same of any recorded choices.

    Args:
        tokens_of: the step in which a call happens, of so many calls for so many tokens, and which of them count.
    """
    judgements = list(_by_token(truth, aligned(candidate, truth), references, dtype, name))
    ours, theirs = _by_kind(candidate), _by_kind(truth)
    yards = [_by_kind(reference) for reference in references]
    for kind in agreed(candidate, truth):
        of_kind = zip(ours[kind], theirs[kind], *(yard[kind] for yard in yards), strict=True)
        for number, (choice, true, *others) in enumerate(of_kind):
            step, valid = tokens_of(number, len(theirs[kind]), len(true.scores))
            name_of_call = f"choice of {kind[1]} out of {kind[0]}" + (f", call {number}" if number else "")
            quantity = Quantity(name_of_call, "routing", step)
            if valid.any():
                judgements.append(_judge_choice(quantity, name, choice, true, others, valid))
    judgements += [
        Judgement(Quantity(f"number chosen out of {options}", "routing"), name, abs(count - right), 0.0, 0.0, 0.0)
        for options, count in ours.keys() - theirs.keys()
        for right in {other for same, other in theirs if same == options}
    ]
    return judgements


def _by_kind(record: Record) -> dict[tuple[int, int], list[Choice]]:
    kinds: dict[tuple[int, int], list[Choice]] = {}
    for choice in record.choices:
        kinds.setdefault((choice.scores.shape[1], choice.chosen.shape[1]), []).append(choice)
    return kinds


def _tokens(case: Case, number: int, calls: int, tokens: int) -> tuple[int, Tensor]:
    """The step in which a call happens, and which of its tokens are no padding."""
    rows, length = case.scenario.rows, case.scenario.length
    steps = (Step(0, 0, length),) if tokens == rows * length else case.steps
    step = steps[number * len(steps) // calls]
    valid = torch.ones(rows, length, dtype=torch.bool) if case.valid is None else case.valid
    return step.index, valid[:, step.start : step.stop].flatten()


def _judge_choice(
    quantity: Quantity, name: str, ours: Choice, true: Choice, references: Sequence[Choice], valid: Tensor
) -> Judgement:
    """How far the truth's score of what was chosen falls behind the k-th highest, relative to the scores' rms."""
    scores, chosen = true.scores[valid].double(), ours.chosen[valid]
    scale = scores[scores > -torch.inf].square().mean().sqrt()
    kth = scores.topk(chosen.shape[1], dim=1).values[:, -1]
    behind = (kth - scores.gather(1, chosen).amin(dim=1)).clamp(min=0) / scale
    yards = [each.scores[valid].double() / scale for each in references]
    allowed = 2 * RMS_FACTOR * _yard(scores / scale, yards, torch.finfo(ours.scores.dtype).eps)
    near_ties = int(((behind > 0) & (behind <= allowed)).sum())
    worst = int((behind / allowed).argmax())
    error, bound = float(behind[worst]), float(allowed[worst])
    return Judgement(quantity, name, error, error, bound, bound, len(behind), near_ties)


def _yard(scores: Tensor, references: Sequence[Tensor], eps: float) -> Tensor:
    """The largest error of the reference's own scores of each token, which is far larger for some than for others."""
    if not references:
        return torch.full_like(scores[:, 0], TRUTH_BOUND / RMS_FACTOR)
    errors = torch.stack([(each - scores).abs().where(scores > -torch.inf, 0.0) for each in references])
    return errors.amax(dim=(0, 2)).clamp(min=eps / 4)


def _by_token(
    truth: Record, candidate: Record, references: Sequence[Record], dtype: torch.dtype, name: str
) -> Iterator[Judgement]:
    """The worst token of every output: its error relative to its own size, both norms, hence the rms factor."""
    floor = TRUTH_BOUND / RMS_FACTOR if dtype is torch.float64 else torch.finfo(dtype).eps / 4
    for index, quantity in enumerate(truth.quantities):
        if quantity.verdict == "output":
            target, valid = truth.values[index].double(), truth.valid[index]
            runs = torch.stack([run.values[index].double() for run in (candidate, *references)])
            distances = (runs - target).norm(dim=-1)
            errors = torch.where(distances == 0, 0.0, distances / target.norm(dim=-1))  # a token may come out as zero
            errors = errors if valid is None else errors.where(valid.squeeze(-1), 0.0)
            ours, *yards = errors.nan_to_num(nan=torch.inf).flatten(1).amax(dim=1).tolist()
            allowed = RMS_FACTOR * max(floor, *yards, 0.0)
            by_token = Quantity(f"{quantity.name} by token", "output", quantity.step)
            yield Judgement(by_token, name, ours, ours, allowed, allowed)
