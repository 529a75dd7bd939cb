"""Cross-entropy with smoothed labels (Szegedy et al. 2016, 1512.00567, section 7; Vaswani et al. 2017, section 5.4).

L = -sum_v q_v log p_v        q_v = (1 - eps) [v = y] + eps / V        log p = log softmax(z)

With a weight w for each class it is q_v w_v in place of q_v, of which w_y is that of the label in the first term.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from reimpl.precision import wide
from reimpl.softmax import log_softmax, safe_softmax

Reduction = Literal["mean", "sum", "none"]
IGNORED = -100  # the label of what does not count, as padding


class _Rows(torch.autograd.Function):
    """The loss of every row, with the gradient p sum_v q_v - q in one step, in which no sum is one of rounded terms."""

    @staticmethod
    def forward(
        ctx: Any, z: Float[Tensor, "*rows classes"], y: Int[Tensor, "*rows"], w: Float[Tensor, " classes"], eps: float
    ) -> Float[Tensor, "*rows"]:
        surprise = -log_softmax(z)
        ctx.save_for_backward(z, y, w)
        ctx.eps = eps
        loss = (1 - eps) * w[y] * surprise.gather(-1, y[..., None])[..., 0]
        return loss + eps * (w * surprise).mean(-1) if eps else loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        z, y, w = ctx.saved_tensors
        target = (ctx.eps * w / len(w)).expand_as(z).contiguous()
        target.scatter_add_(-1, y[..., None], ((1 - ctx.eps) * w[y])[..., None])
        total = (1 - ctx.eps) * w[y] + ctx.eps * w.mean()
        return gradients[0][..., None] * (safe_softmax(z) * total[..., None] - target), None, None, None


def cross_entropy(
    logits: Float[Tensor, "*rows classes"],
    labels: Int[Tensor, "*rows"],
    *,
    smoothing: float = 0.0,
    weight: Float[Tensor, " classes"] | None = None,
    ignored: int = IGNORED,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Cross-entropy of logits with labels of which `smoothing` is spread evenly over all classes.

    Args:
        smoothing: eps, from 0 to 1; the paper's is 0.1.
        weight: of each class, in both terms; a mean divides by the weights of the labels.
        ignored: rows with this label are left out, of the mean's divisor, too. A mean over none is NaN.
        reduction: one loss per row for "none", 0 where the label is ignored.

    Raises:
        ValueError: for a smoothing beyond 0 and 1, an unknown reduction, or a label that is no class.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing is {smoothing}: it is a share of the label, between 0 and 1")
    counted, classes = labels != ignored, logits.shape[-1]
    y = labels.masked_fill(~counted, 0)
    if ((y < 0) | (y >= classes)).any():
        raise ValueError(f"labels run from {y.min()} to {y.max()}: they must be below {classes}, or {ignored}")
    z = logits.to(wide(logits))
    weights = z.new_ones(classes) if weight is None else weight.to(z)
    loss = _Rows.apply(z, y, weights, smoothing)
    loss = loss.masked_fill(~counted, 0)
    return _reduced(loss, (weights[y] * counted).sum(), reduction).to(logits.dtype)


def _reduced(loss: Tensor, divisor: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}: it must be 'mean', 'sum' or 'none'")
    return loss.sum() / divisor if reduction == "mean" else loss.sum()
