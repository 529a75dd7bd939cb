"""Distances between tokens that lower their scores: with which slopes, counted how."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ALIBI, MODELS
from parity.mistakes.seams import Function, everywhere
from reimpl.position import alibi_bias, alibi_slopes

KIND = "alibi"
SCORES = ("scores",)


def geometric(slopes: Function) -> Function:
    """2^(-8h/n), whatever the number of heads n."""

    def call(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))).to(dtype)

    return call


def reach_further(bias: Function) -> Function:
    return lambda slopes, queries, keys: -bias(slopes, queries, keys)


def count_padding(bias: Function) -> Function:
    def call(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        every = torch.arange(keys.shape[1])[None]
        return bias(slopes, every[:, -queries.shape[1] :], every)

    return call


MISTAKES = (
    Mistake(
        "takes the slopes of a power of two for any number of heads",
        everywhere(alibi_slopes, geometric),
        (Place(ALIBI, MODELS, "heads=6 b1 s3", "heads=2 b1 s4"),),
        SCORES,
        "a number of heads that is no power of two",
    ),
    Mistake(
        "gives the slopes to the heads in the reverse order",
        everywhere(alibi_slopes, lambda slopes: lambda *args: slopes(*args).flip(0)),
        (Place(ALIBI, MODELS, "b1 s3", "heads=1 b1 s4"),),
        SCORES,
        "more than one head",
    ),
    Mistake(
        "raises scores with the distance",
        everywhere(alibi_bias, reach_further),
        (Place(ALIBI, MODELS, "b1 s3", "b1 s1"),),
        SCORES,
        "more than one token",
    ),
    Mistake(
        "counts padding among the distances",
        everywhere(alibi_bias, count_padding),
        (Place(ALIBI, MODELS, "b2 s5 inner0,2", "b1 s4"),),
        SCORES,
        "padding between tokens",
    ),
)
