"""What the error of an output looks like: exact at the first positions, growing, a constant ratio, only some rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity.case import Case, Step

EXACT = 1e-9  # float64 rounding stays far below; the smallest mistake that a test has to see is far above


def describe(case: Case, step: Step, ours: Tensor, theirs: Tensor) -> tuple[str, ...]:
    """The patterns of an error, as short phrases.

    Args:
        ours, theirs: [rows, tokens, ...], float64.
    """
    if ours.shape != theirs.shape or ours.ndim < 2:
        return ()
    return tuple(_patterns(case, step, ours.detach(), theirs.detach()))


def _patterns(case: Case, step: Step, ours: Tensor, theirs: Tensor) -> Iterator[str]:
    valid = torch.ones(ours.shape[:2], dtype=torch.bool)
    if case.valid is not None:
        valid = case.valid[:, step.start : step.stop]
    scale = theirs[valid].square().mean().sqrt()
    error = (ours - theirs).flatten(2).norm(dim=-1) / scale
    error = torch.where(valid, error, torch.zeros(())).nan_to_num(nan=torch.inf)
    if not (error > EXACT).any():
        yield "the output is exact; only what leads to it, or the cache, differs"
        return
    yield from _by_token(error.amax(dim=0))
    if case.valid is not None and (plain := case.valid.all(dim=1)).any() and not (error[plain] > EXACT).any():
        yield "rows without padding are exact"
    ratio = (ours[valid] * theirs[valid]).sum() / theirs[valid].square().sum()
    if (ours[valid] - ratio * theirs[valid]).square().mean().sqrt() <= EXACT * scale * ratio.abs():
        yield f"a constant ratio of {ratio.item():.6g}"


def _by_token(error: Tensor) -> Iterator[str]:
    wrong = (error > EXACT).nonzero()[:, 0].tolist()
    if len(error) == 1:
        return
    if wrong[0] == 1:
        yield "position 0 exact"
    elif wrong[0] > 1:
        yield f"the first {wrong[0]} tokens exact"
    rest = error[wrong[0] :]
    if len(rest) > 2 and (rest[1:] > rest[:-1]).all():
        yield "grows with position"
