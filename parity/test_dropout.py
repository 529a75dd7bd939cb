"""In training dropout sits where the reference has it.

Both sides drop the same numbers: the n-th dropout of a run is exchanged for one whose choice follows from n alone, that
of the weights within a fused kernel included. Then outputs are equal if, and only if, the same things are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parity import family as families
from parity.compare import judge
from parity.pair import Pair, forward, run_candidate, run_truth
from parity.scenario import parse_scenario
from parity.tiny import draw
from reimpl.attention import MultiHead

pytestmark = pytest.mark.parity

F64 = torch.float64
LAYERS = [
    ("transformer", "attention", "b2 s3"),
    ("transformer", "encoder_layer", "b2 s3"),
    ("transformer", "encoder_layer", "norm_first=yes b2 s3"),
    ("transformer", "decoder_layer", "b2 s3 m4"),
    ("transformer", "decoder_layer", "norm_first=yes b2 s3 m4"),
    ("transformer", "model", "b2 s3 m4"),
    ("bert", "block", "b2 s3"),
    ("gpt2", "block", "b2 s3"),
    ("gpt2", "model", "b2 s3"),
    ("bloom", "block", "b2 s3"),
    ("marian", "encoder", "b2 s3"),
    ("marian", "decoder", "b2 s3 m4"),
]

of_each_layer = pytest.mark.parametrize(
    ("model_type", "layer", "line"), [pytest.param(*each, id=" ".join(each)) for each in LAYERS]
)


@contextmanager
def repeatable() -> Iterator[count]:
    """Let dropout choose by its number in the run, as long as the context lasts; gives the count so far."""
    numbers = count()

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = draw.tokens(x.numel(), 2, next(numbers), "dropout").view(x.shape)
        return x * kept / (1 - p)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -math.inf)
        scores = scores if attn_mask is None else scores + attn_mask
        return dropout(scores.softmax(-1), dropout_p) @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        patch.setattr(F, "scaled_dot_product_attention", attention)
        yield numbers


def holds(pair: Pair, line: str) -> bool:
    """Whether both sides, in training, compute the same in float64."""
    case = pair.case(parse_scenario(f"{line} f64 #5"))
    with repeatable() as numbers:
        truth = run_truth(pair, case, forward)
        assert next(numbers) > 0, "the reference drops nothing"
    with repeatable():
        ours = run_candidate(pair, case, forward, F64)
    return all(judgement.holds for judgement in judge(truth, ours, [], F64, "f64"))


def in_training(model_type: str, layer: str, line: str) -> Pair:
    """A pair of its own, as its modules are changed."""
    family = families.load(model_type)
    values = dict(parse_scenario(line).config)
    if "masking" in [axis.name for axis in family.axes]:
        values["masking"] = "boolean"
    pair = Pair(family, family.layer(layer), values)
    pair.reference(F64).module.train()
    pair.candidate(F64).module.train()
    return pair


@of_each_layer
def test_sits_where_the_reference_has_it(model_type: str, layer: str, line: str) -> None:
    assert holds(in_training(model_type, layer, line), line)


@of_each_layer
def test_leaving_out_any_one_shows(model_type: str, layer: str, line: str) -> None:
    pair = in_training(model_type, layer, line)
    for part in pair.candidate(F64).module.modules():
        name = {nn.Dropout: "p"}.get(type(part), "dropout" if isinstance(part, MultiHead) else "")
        if name:
            rate = getattr(part, name)
            setattr(part, name, 0.0)
            assert not holds(pair, line), f"nobody misses {part}"
            setattr(part, name, rate)
    assert holds(pair, line)
