"""Softmax and log-sum-exp at any magnitude and under any mask, a row without any entry among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from parity.compare import Judgement
from parity.function import Function, differentiable, same
from parity.tiny import draw
from reimpl.softmax import log_softmax, log_sum_exp, safe_softmax


@dataclass(frozen=True)
class Scores:
    """Scores in rows and columns: how large, how many of a hundred are masked, and along which of both a row lies."""

    rows: int
    columns: int
    scale: float
    masked: int
    dim: int
    seed: int


def judge(scores: Scores) -> list[Judgement]:
    """Both functions and their gradients in every dtype; where all is masked, what the rule of `mask` says."""
    shape, seed, dim = (scores.rows, scores.columns), scores.seed, scores.dim
    masked = draw.tokens(shape, 100, seed, "mask") < scores.masked
    x = draw.bfloat16(draw.normal(shape, seed, "x") * scores.scale).masked_fill(masked, -torch.inf)
    some = ~masked.all(dim)
    softmax = differentiable(
        "softmax",
        lambda scores: safe_softmax(scores, dim),
        lambda scores: torch.ops.aten._safe_softmax(scores, dim),  # what attention takes: 0 where all is masked
        x,
        draw.bfloat16(draw.normal(shape, seed, "upstream")),
    )
    total = differentiable(
        "log-sum-exp",
        lambda scores: log_sum_exp(scores, dim),
        lambda scores: torch.logsumexp(scores, dim),
        x.masked_fill(~some.unsqueeze(dim), 0),
        draw.bfloat16(draw.normal(some.shape, seed, "upstream")),
    )
    logarithm = differentiable(
        "log-softmax",
        lambda scores: log_softmax(scores, dim),
        lambda scores: torch.log_softmax(scores, dim),
        x.masked_fill(masked, 0),
        draw.bfloat16(draw.normal(shape, seed, "upstream")),
    )
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_sum_exp(leaf, dim).sum(), leaf)
    return [
        *softmax,
        *total,
        *logarithm,
        same("log-sum-exp of nothing", log_sum_exp(x, dim)[~some].tolist(), torch.logsumexp(x, dim)[~some].tolist()),
        same("gradient of nothing", gradient.isnan().sum().item(), 0, "gradient"),
    ]


FUNCTION = Function(
    "softmax",
    "softmax, its logarithm and log-sum-exp, with gradients, for scores up to 1e4 and rows without any entry",
    "reimpl.softmax",
    "torch.softmax (as attention takes it), torch.log_softmax, torch.logsumexp",
    st.builds(
        Scores,
        rows=st.integers(1, 6),
        columns=st.integers(1, 9),
        scale=st.sampled_from((1.0, 1e-3, 30.0, 1e3, 1e4)),
        masked=st.sampled_from((0, 30, 80, 100)),
        dim=st.sampled_from((-1, 0)),
        seed=st.integers(0, 2**32 - 1),
    ),
    judge,
)
