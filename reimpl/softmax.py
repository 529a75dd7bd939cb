"""Softmax and log-sum-exp that do not overflow: the largest entry m is subtracted first, which changes neither.

    softmax(x)_i = e^(x_i - m) / sum_j e^(x_j - m)        log sum_j e^x_j = m + log sum_j e^(x_j - m)

An entry that is masked is -inf. A row where all are gets the weights 0, as attention gives them (see `mask`), and the
log-sum-exp -inf, of which the gradient is 0; torch's own gives NaN for the first and for the last. Sums run in at least
float32.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from reimpl.precision import wide


class _Softmax(torch.autograd.Function):
    """With the gradient p (g - sum_j p_j g_j): through each operation by itself it would be rounded twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        powers = (x - _largest(x, dim)).exp()
        total = powers.sum(dim, keepdim=True)
        weights = powers / total.masked_fill(total == 0, 1)
        ctx.save_for_backward(weights)
        ctx.dim = dim
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        gradient = gradients[0]
        return weights * (gradient - (weights * gradient).sum(ctx.dim, keepdim=True)), None


class _LogSoftmax(torch.autograd.Function):
    """With the gradient g - p sum_j g_j, in one step, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        shifted = x - _largest(x, dim)
        powers = shifted.exp()
        total = powers.sum(dim, keepdim=True)
        ctx.save_for_backward(powers / total)
        ctx.dim = dim
        return shifted - total.log().masked_fill(total == 0, -torch.inf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        gradient = gradients[0]
        return gradient - weights * gradient.sum(ctx.dim, keepdim=True), None


def safe_softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """e^x over its sum along `dim`; 0 where all of a row is masked."""
    return _Softmax.apply(x.to(wide(x)), dim).to(x.dtype)


def log_sum_exp(x: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """The logarithm of the sum of e^x along `dim`, which is left out of the result."""
    largest = _largest(x, dim)
    total = (x.to(wide(x)) - largest).exp().sum(dim)
    empty = total == 0
    logarithm = total.masked_fill(empty, 1).log() + largest.squeeze(dim)
    return logarithm.masked_fill(empty, -torch.inf).to(x.dtype)


def log_softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """x less its log-sum-exp. Both lose m first: if it is large, its rounding would be all that their difference shows.

    NaN where all of a row is masked, as the logarithm of a row of zeros would be.
    """
    return _LogSoftmax.apply(x.to(wide(x)), dim).to(x.dtype)


def _largest(x: Tensor, dim: int) -> Tensor:
    """The largest entry, at which no gradient arrives, as any other number would do; 0 where none is finite."""
    largest = x.detach().to(wide(x)).amax(dim, keepdim=True)
    return largest.masked_fill(largest.isinf(), 0)
