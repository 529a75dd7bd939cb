"""What belongs to training alone, or is missing there."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, GATED, GROUPED, NORMS, RMS
from parity.mistakes.seams import Function, narrow, wrapped
from reimpl import attention, norm
from reimpl.attention import Attention, MultiHead
from reimpl.pre_norm import PreNormLayer

KIND = "training"


def drop(mix: Function) -> Function:
    def call(self: Any, *args: Any) -> Tensor:
        with patch.object(self, "training", True), patch.object(self, "dropout", 0.5):
            return mix(self, *args)

    return call


def detach_statistic(inverse_rms: Function) -> Function:
    return lambda x, eps: inverse_rms(x, eps).detach()


def detach_k(turn: Function) -> Function:
    def call(self: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
        q, k = turn(self, *args)
        return q, k.detach()

    return call


def residual_in_place(forward: Function) -> Function:
    return lambda self, x, *args, **kwargs: x.copy_(forward(self, x, *args, **kwargs))


MISTAKES = (
    Mistake(
        "drops weights out in eval",
        wrapped(MultiHead, "mix", drop),
        (Place(GROUPED, ATTENDING, "b1 s3"),),
        ("weights", "context"),
        "any input, in eval",
        source="karpathy/nanoGPT#240",
    ),
    Mistake(
        "takes the softmax in the model's dtype",
        narrow(attention),
        (Place(GROUPED, ATTENDING, "attend=eager b1 s4", "attend=eager b1 s4 f32"),),
        ("softmax",),
        "half precision",
        verdicts=("output", "cache", "precision"),
        dtype="bf16",
    ),
    Mistake(
        "detaches k",
        wrapped(Attention, "turn", detach_k),
        (Place(GROUPED, ATTENDING, "b1 s3", "b1 s1"),),
        ("gradient of k", "gradient of k after rotation", "gradient of k_norm"),
        "gradients of more than one token",
        verdicts=("gradient",),
        prop="gradients",
    ),
    Mistake(
        "detaches the statistic of the norm",
        wrapped(norm, "inverse_rms", detach_statistic),
        (Place(RMS, NORMS, "b1 s2"),),
        ("gradient of input", "gradient of input of post_attention_layernorm", "gradient of output"),
        "any gradient through a norm",
        verdicts=("gradient",),
        prop="gradients",
    ),
    Mistake(
        "adds the residual in place",
        wrapped(PreNormLayer, "forward", residual_in_place),
        (Place(GATED, ("block",), "b1 s2"),),
        ("writes to x in torch.float64",),
        "any input, once it is looked at again",
        verdicts=("side effects",),
    ),
)
