"""Norms: epsilon, mean, gain, residual, and the precision of the statistic."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import BLOCKS, DECODERS, GATED, MODELS, NORMS, RMS
from parity.mistakes.seams import (
    Function,
    built,
    configured,
    exchanged,
    loaded_each,
    narrow,
    swapped,
    wrapped,
)
from reimpl import norm
from reimpl.decoder import Decoder
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormLayer

KIND = "norm"
PARTS = ("output", "input_layernorm")
ANY = "any input: all that a norm computes depends on it"


def subtract_mean(forward: Function) -> Function:
    return lambda self, x: forward(self, x - x.mean(-1, keepdim=True))


def add_eps_outside(x: Tensor, eps: float) -> Tensor:
    return 1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def divide_by_n_minus_one(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + eps)


def residual_after_norm(forward: Function) -> Function:
    def call(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        normalised = self.input_layernorm(x)
        with patch.object(self.input_layernorm, "forward", lambda x: x):
            return forward(self, normalised, *args, **kwargs)

    return call


MISTAKES = (
    Mistake(
        "ignores the epsilon of the norms",
        configured(lambda fields: {"rms_norm_eps": 1e-6}),
        (Place(RMS, NORMS, "eps=0.01 b1 s2 x0.001", "b1 s4"),),
        PARTS,
        "an epsilon other than the class's default, best on small inputs",
        source="huggingface/candle#271",
    ),
    Mistake(
        "adds eps outside of the root",
        exchanged(norm, "inverse_rms", add_eps_outside),
        (Place(RMS, NORMS, "eps=0.01 b1 s2"),),
        PARTS,
        "any input: the root of eps is far larger than eps",
    ),
    Mistake(
        "subtracts the mean",
        wrapped(RMSNorm, "forward", subtract_mean),
        (Place(RMS, NORMS, "b1 s2"),),
        PARTS,
        "any input: none has a mean of 0",
    ),
    Mistake(
        "divides the squares by n - 1",
        exchanged(norm, "inverse_rms", divide_by_n_minus_one),
        (Place(RMS, NORMS, "b1 s2"),),
        PARTS,
        ANY,
    ),
    Mistake(
        "forgets the gains",
        loaded_each("norm.weight", lambda gain, config: gain * 0 + 1),
        (Place(RMS, NORMS, "b1 s2"),),
        PARTS,
        "any input, where gains are not 1",
    ),
    Mistake(
        "adds 1 to the gains",
        loaded_each("norm.weight", lambda gain, config: gain + 1),
        (Place(RMS, NORMS, "b1 s2"),),
        PARTS,
        ANY,
        remedy="weights |= {name: gain - 1 for name, gain in weights.items() if name.endswith('norm.weight')}",
    ),
    Mistake(
        "normalises in the model's dtype",
        narrow(norm),
        (Place(RMS, NORMS, "b1 s4", "b1 s4 f32"),),
        ("norm statistic",),
        "half precision",
        verdicts=("output", "cache", "precision"),
        dtype="bf16",
        source="Lightning-AI/lightning-thunder#1713",
    ),
    Mistake(
        "swaps the gains of the two norms of a layer",
        swapped("input_layernorm", "post_attention_layernorm"),
        (Place(RMS, BLOCKS, "b1 s2"),),
        ("input_layernorm",),
        "any input, where the two have different gains",
        remedy="one, other = 'input_layernorm.weight', 'post_attention_layernorm.weight'; "
        "weights[one], weights[other] = weights[other], weights[one]",
    ),
    Mistake(
        "skips the final norm",
        built(Decoder, lambda model: setattr(model.norm, "forward", lambda x: x)),
        (Place(DECODERS, MODELS, "b1 s2"),),
        ("norm",),
        ANY,
    ),
    Mistake(
        "takes the residual after the norm",
        wrapped(PreNormLayer, "forward", residual_after_norm),
        (Place(GATED, BLOCKS, "b1 s2"),),
        ("input of post_attention_layernorm",),
        ANY,
    ),
)
