"""Cross-entropy with smoothed labels, weights of classes, ignored rows, and every reduction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from parity.compare import Judgement
from parity.function import Function, differentiable, same
from parity.tiny import draw
from reimpl.loss import IGNORED, Reduction, cross_entropy


@dataclass(frozen=True)
class Batch:
    """Logits of rows over classes: how large, how many rows of a hundred are ignored, and how the loss is taken."""

    rows: int
    classes: int
    scale: float
    ignored: int
    smoothing: float
    weighted: bool
    reduction: Reduction
    seed: int


def judge(batch: Batch) -> list[Judgement]:
    """The loss and its gradient in every dtype; a mean over no row is NaN on both sides."""
    rows, classes, seed = batch.rows, batch.classes, batch.seed
    left_out = draw.tokens((rows,), 100, seed, "ignored") < batch.ignored
    label = 1 if batch.weighted else IGNORED  # a class may be the one that is ignored
    labels = draw.tokens((rows,), classes, seed, "labels").masked_fill(left_out, label)
    weight = draw.bfloat16(draw.normal((classes,), seed, "weight").abs() + 0.125) if batch.weighted else None

    def ours(logits: Tensor) -> Tensor:
        weights = None if weight is None else weight.to(logits.dtype)
        return cross_entropy(
            logits, labels, smoothing=batch.smoothing, weight=weights, ignored=label, reduction=batch.reduction
        )

    def theirs(logits: Tensor) -> Tensor:
        weights = None if weight is None else weight.to(logits.dtype)
        loss = nn.CrossEntropyLoss(weights, None, label, None, batch.reduction, batch.smoothing)
        return loss(logits, labels)

    x = draw.bfloat16(draw.normal((rows, classes), seed, "logits") * batch.scale)
    if batch.reduction == "mean" and (labels == label).all():
        return [same("mean over nothing", ours(x).isnan().item(), theirs(x).isnan().item())]
    shape = (rows,) if batch.reduction == "none" else ()
    upstream = draw.bfloat16(draw.normal((rows,), seed, "upstream"))
    return differentiable("loss", ours, theirs, x, upstream if shape else torch.tensor(1.5))


FUNCTION = Function(
    "loss",
    "cross-entropy with smoothed labels, and its gradient, under weights, ignored rows and every reduction",
    "reimpl.loss.cross_entropy",
    "torch.nn.CrossEntropyLoss",
    st.builds(
        Batch,
        rows=st.integers(1, 7),
        classes=st.integers(2, 11),
        scale=st.sampled_from((1.0, 1e-3, 30.0, 1e4)),
        ignored=st.sampled_from((0, 40, 100)),
        smoothing=st.sampled_from((0.0, 0.1, 0.5, 1.0)),
        weighted=st.booleans(),
        reduction=st.sampled_from(("mean", "sum", "none")),
        seed=st.integers(0, 2**32 - 1),
    ),
    judge,
)
