"""Norms: epsilon, mean, gain, bias, where they stand, and the precision of the statistic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import BERT, BLOCKS, DECODERS, GATED, GPT2, MODELS, NORMS, RMS, SOFTMAX_ROUTED
from parity.mistakes.seams import (
    Exchange,
    Function,
    built,
    configured,
    exchanged,
    loaded,
    narrow,
    several,
    swapped,
    wrapped,
)
from reimpl import norm
from reimpl.bert import BertEmbeddings, BertOutput
from reimpl.decoder import Decoder
from reimpl.gpt2 import GPT2Block, GPT2Model
from reimpl.mixtral import MixtralDecoderLayer
from reimpl.norm import LayerNorm, RMSNorm
from reimpl.pre_norm import PreNormLayer

KIND = "norm"
PARTS = ("output", "input_layernorm", "ln_1", "LayerNorm", "embeddings")
ANY = "any input: all that a norm computes depends on it"
ROOT = (Place(RMS, NORMS, "b1 s2"),)
LAYER = (Place(GPT2, BLOCKS, "b1 s2"), Place(BERT, ("embeddings", *BLOCKS), "b1 s2"))
PRE_NORM = tuple(dict.fromkeys((*GATED, *SOFTMAX_ROUTED)))
EPSILONS = {"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-12}


def subtract_mean(forward: Function) -> Function:
    return lambda self, x: forward(self, x - x.mean(-1, keepdim=True))


def add_eps_outside(x: Tensor, eps: float) -> Tensor:
    return 1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def divide_by_n_minus_one(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + eps)


def sum_for_mean(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def layer_norm(statistic: Callable[[Tensor, float], tuple[Tensor, Tensor]]) -> Exchange:
    """Layer norm with another mean and another root."""

    def forward(self: Any, x: Tensor) -> Tensor:
        mean, root = statistic(x, self.eps)
        return (x - mean) / root * self.weight + (0 if self.bias is None else self.bias)

    return exchanged(LayerNorm, "forward", forward)


def root_mean_square(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_zeros(()), (x.square().mean(-1, keepdim=True) + eps).sqrt()


def unbiased(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(-1, keepdim=True), (x.var(-1, keepdim=True) + eps).sqrt()


def eps_outside(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(-1, keepdim=True), x.std(-1, keepdim=True, correction=0) + eps


def of_norms(ending: str, change: Callable[[Tensor], Tensor]) -> Exchange:
    """Our side reads other gains or biases of norms."""

    def is_norm(name: str) -> bool:
        *_, module, parameter = ["", *name.split(".")]
        return parameter == ending and ("norm" in module.lower() or module.startswith("ln_") or not module)

    return loaded(lambda weights, config: {name: change(w) for name, w in weights.items() if is_norm(name)})


def first_norm_of(layer: Any) -> Any:
    return layer.ln_1 if isinstance(layer, GPT2Block) else layer.input_layernorm


def residual_after_norm(forward: Function) -> Function:
    def call(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norm = first_norm_of(self)
        normalised = norm(x)
        with patch.object(norm, "forward", lambda x: x):
            return forward(self, normalised, *args, **kwargs)

    return call


def norm_after_sum(self: Any, x: Tensor, rotary: Any = None, mask: Any = None, cache: Any = None) -> Tensor:
    """Post-norm in the place of pre-norm."""
    z = self.input_layernorm(x + self.self_attn(x, rotary, mask, cache))
    return self.post_attention_layernorm(z + self.mlp(z))


def norm_before_sum(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    return residual + self.LayerNorm(self.dropout(self.dense(x)))


def without_residual(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    return self.LayerNorm(self.dropout(self.dense(x)))


def skipping(*names: str) -> Callable[[Any], None]:
    """Norms that let everything pass."""

    def change(module: Any) -> None:
        for name in names:
            setattr(getattr(module, name), "forward", lambda x: x)  # noqa: B010 (a type checker knows it as a method)

    return change


MISTAKES = (
    Mistake(
        "ignores the epsilon of the norms",
        configured(lambda fields: EPSILONS),
        (
            Place(RMS, NORMS, "eps=0.01 b1 s2 x0.001", "b1 s4"),
            Place(GPT2, BLOCKS, "eps=0.01 b1 s2 x0.001", "b1 s4"),
            Place(BERT, ("embeddings", *BLOCKS), "eps=0.01 b1 s2", "b1 s4"),
        ),
        PARTS,
        "an epsilon other than the class's default, best on small inputs",
        source="huggingface/candle#271",
    ),
    Mistake(
        "adds the epsilon outside of the root",
        several(exchanged(norm, "inverse_rms", add_eps_outside), layer_norm(eps_outside)),
        (
            Place(RMS, NORMS, "eps=0.01 b1 s2"),
            Place(GPT2, BLOCKS, "eps=0.01 b1 s2"),
            Place(BERT, ("embeddings", *BLOCKS), "eps=0.01 b1 s2"),
        ),
        PARTS,
        "any input: the root of an epsilon is far larger than the epsilon",
    ),
    Mistake("subtracts the mean", wrapped(RMSNorm, "forward", subtract_mean), ROOT, PARTS, "any input with a mean"),
    Mistake("does not subtract the mean", layer_norm(root_mean_square), LAYER, PARTS, "any input with a mean"),
    Mistake(
        "divides squares by n - 1",
        several(exchanged(norm, "inverse_rms", divide_by_n_minus_one), layer_norm(unbiased)),
        (*ROOT, *LAYER),
        PARTS,
        ANY,
    ),
    Mistake("sums squares for their mean", exchanged(norm, "inverse_rms", sum_for_mean), ROOT, PARTS, ANY),
    Mistake(
        "forgets the gains",
        of_norms("weight", torch.ones_like),
        (*ROOT, *LAYER),
        PARTS,
        "any input, where gains are not 1",
    ),
    Mistake(
        "adds 1 to the gains",
        of_norms("weight", lambda gain: gain + 1),
        ROOT,
        PARTS,
        ANY,
        remedy="weights |= {name: gain - 1 for name, gain in weights.items() if name.endswith('norm.weight')}",
    ),
    Mistake(
        "forgets the biases of the norms",
        of_norms("bias", torch.zeros_like),
        LAYER,
        PARTS,
        "any input, where biases are not 0",
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
        several(swapped("input_layernorm", "post_attention_layernorm"), swapped("ln_1", "ln_2")),
        (Place((*PRE_NORM, *GPT2), BLOCKS, "b1 s2"),),
        PARTS,
        "any input, where the two have different gains",
        remedy="one, other = 'input_layernorm.weight', 'post_attention_layernorm.weight'; "
        "weights[one], weights[other] = weights[other], weights[one]",
    ),
    Mistake(
        "skips the final norm",
        several(built(Decoder, skipping("norm")), built(GPT2Model, skipping("ln_f"))),
        (Place((*DECODERS, *GPT2), MODELS, "b1 s2"),),
        ("norm", "ln_f"),
        ANY,
    ),
    Mistake(
        "skips the norm of the embeddings",
        built(BertEmbeddings, skipping("LayerNorm")),
        (Place(BERT, ("embeddings", "model", "decoder_model", "logits"), "b1 s2"),),
        PARTS,
        ANY,
    ),
    Mistake(
        "takes the residual after the norm",
        several(
            *(wrapped(cls, "forward", residual_after_norm) for cls in (PreNormLayer, MixtralDecoderLayer, GPT2Block))
        ),
        (Place((*PRE_NORM, *GPT2), BLOCKS, "b1 s2"),),
        ("input of post_attention_layernorm", "post_attention_layernorm", "input of ln_2"),
        ANY,
    ),
    Mistake(
        "norms after the sum where the reference norms before",
        exchanged(PreNormLayer, "forward", norm_after_sum),
        (Place(GATED, BLOCKS, "b1 s2"),),
        PARTS,
        ANY,
    ),
    Mistake(
        "norms before the sum where the reference norms after",
        exchanged(BertOutput, "forward", norm_before_sum),
        (Place(BERT, ("attention", *BLOCKS), "b1 s2"),),
        ("input of LayerNorm", "LayerNorm"),
        ANY,
    ),
    Mistake(
        "leaves out the residual",
        exchanged(BertOutput, "forward", without_residual),
        (Place(BERT, ("attention", *BLOCKS), "b1 s2"),),
        ("input of LayerNorm", "LayerNorm"),
        ANY,
    ),
)
