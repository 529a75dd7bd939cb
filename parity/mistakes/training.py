"""What belongs to training alone, or is missing there: dropout, noise, gradients, the loss that balances experts."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parity.candidate import Candidate
from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import (
    ATTENDING,
    BALANCED,
    BERT,
    EXPERTS,
    GATED,
    GPT2,
    GROUPED,
    JITTERED,
    LATENT,
    NORMS,
    RMS,
    SOFTMAX_ROUTED,
)
from parity.mistakes.seams import Function, built, exchanged, narrow, wrapped
from reimpl import attention, moe, norm
from reimpl.attention import Attention, MultiHead
from reimpl.mixtral import MixtralSparseMoeBlock
from reimpl.moe import Experts
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormLayer
from reimpl.precision import wide

KIND = "training"
GRADIENT = ("gradient",)
LOSS = ("load-balancing loss", "gradient of load-balancing loss")


def drop(mix: Function) -> Function:
    def call(self: Any, *args: Any) -> Tensor:
        with patch.object(self, "training", True), patch.object(self, "dropout", 0.5):
            return mix(self, *args)

    return call


def drop_everywhere(candidate: Any) -> None:
    for part in candidate.module.modules():
        if isinstance(part, nn.Dropout):
            part.forward = partial(F.dropout, p=part.p)  # type: ignore[method-assign]


def jitter(forward: Function) -> Function:
    def call(self: Any, x: Tensor) -> Tensor:
        with patch.object(self, "training", True):
            return forward(self, x)

    return call


def detach_statistic(inverse_rms: Function) -> Function:
    return lambda x, eps: inverse_rms(x, eps).detach()


def detach_k(turn: Function) -> Function:
    def call(self: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
        q, k = turn(self, *args)
        return q, k.detach()

    return call


def detach_weights(forward: Function) -> Function:
    return lambda self, x, experts, weights: forward(self, x, experts, weights.detach())


def residual_in_place(forward: Function) -> Function:
    return lambda self, x, *args, **kwargs: x.copy_(forward(self, x, *args, **kwargs))


def norm_in_place(forward: Function) -> Function:
    return lambda self, x: x.copy_(forward(self, x))


def balance(
    probabilities_of: Function = lambda logits: logits.softmax(-1), counts_padding: bool = False, factor: bool = True
) -> Function:
    """The loss that balances experts, with something else in one of its places."""

    def loss(logits: Any, chosen: int, valid: Any = None) -> Tensor:
        probabilities = probabilities_of(torch.cat(list(logits)))
        experts = probabilities.topk(chosen, dim=-1).indices
        used = torch.zeros_like(probabilities, dtype=wide(probabilities)).scatter(-1, experts, 1)
        if valid is not None and not counts_padding:
            counted = valid.flatten().repeat(len(logits))
            probabilities, used = probabilities[counted], used[counted]
        return (probabilities.shape[-1] if factor else 1) * (used.mean(0) * probabilities.mean(0)).sum()

    return loss


MISTAKES = (
    Mistake(
        "drops weights of attention out in eval",
        wrapped(MultiHead, "mix", drop),
        (Place((*GROUPED, *GPT2, *BERT), ATTENDING, "b1 s3"),),
        ("weights", "context", "output"),
        "any input, in eval",
        source="karpathy/nanoGPT#240",
    ),
    Mistake(
        "drops hidden states out in eval",
        built(Candidate, drop_everywhere),
        (Place((*GPT2, *BERT), ATTENDING, "b1 s3"),),
        ("output", "c_proj", "resid_dropout", "input of LayerNorm", "LayerNorm", "dropout"),
        "any input, in eval",
        source="karpathy/nanoGPT#240",
    ),
    Mistake(
        "jitters what goes into experts in eval",
        wrapped(MixtralSparseMoeBlock, "forward", jitter),
        (Place(JITTERED, EXPERTS, "jitter=0.1 b1 s3", "b1 s4"),),
        ("gate", "act_fn", "output", "input of experts", "input of gate"),
        "router_jitter_noise",
    ),
    Mistake(
        "takes the softmax in the model's dtype",
        narrow(attention),
        (Place((*GROUPED, *LATENT), ATTENDING, "attend=eager b1 s4", "attend=eager b1 s4 f32"),),
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
        verdicts=GRADIENT,
        prop="gradients",
    ),
    Mistake(
        "detaches the statistic of the norm",
        wrapped(norm, "inverse_rms", detach_statistic),
        (Place(RMS, NORMS, "b1 s2"),),
        ("gradient of input", "gradient of input of post_attention_layernorm", "gradient of output"),
        "any gradient through a norm",
        verdicts=GRADIENT,
        prop="gradients",
    ),
    Mistake(
        "detaches the weights of experts",
        wrapped(Experts, "forward", detach_weights),
        (Place((*SOFTMAX_ROUTED, *LATENT), EXPERTS, "b1 s3"),),
        ("gradient of gate", "gradient of input of gate", "gradient of input", "gradient of gate.weight"),
        "any gradient through a router",
        verdicts=GRADIENT,
        prop="gradients",
        source="AI-Hypercomputer/maxtext#5042",
    ),
    Mistake(
        "adds the residual in place",
        wrapped(PreNormLayer, "forward", residual_in_place),
        (Place(GATED, ("block",), "b1 s2"),),
        ("writes to x in torch.float64",),
        "any input, once it is looked at again",
        verdicts=("side effects",),
    ),
    Mistake(
        "norms in place",
        wrapped(RMSNorm, "forward", norm_in_place),
        (Place(RMS, ("norm",), "b1 s2"),),
        ("writes to x in torch.float64",),
        "any input, once it is looked at again",
        verdicts=("side effects",),
    ),
    Mistake(
        "takes a softmax of a softmax for the loss that balances experts",
        exchanged(moe, "load_balancing_loss", balance(lambda logits: logits.softmax(-1).softmax(-1))),
        (Place(BALANCED, ("model",), "b2 s4"),),
        (),
        "any logits, once a loss is made of them",
        verdicts=("output", "gradient"),
        prop="balance",
        source="huggingface/transformers#28255",
    ),
    Mistake(
        "counts padding in the loss that balances experts",
        exchanged(moe, "load_balancing_loss", balance(counts_padding=True)),
        (Place(BALANCED, ("model",), "b2 s4 left0,2", "b2 s4"),),
        (),
        "padding",
        verdicts=("output", "gradient"),
        prop="balance",
        source="huggingface/transformers#28255",
    ),
    Mistake(
        "does not multiply the loss that balances experts by their number",
        exchanged(moe, "load_balancing_loss", balance(factor=False)),
        (Place(BALANCED, ("model",), "b2 s4"),),
        (),
        "any logits, once a loss is made of them",
        verdicts=("output", "gradient"),
        prop="balance",
    ),
)
