"""With what weights the outputs of the chosen experts are added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import EXPERTS, LATENT, RENORMALISING, SOFTMAX_ROUTED, SOMETIMES_RENORMALISING
from parity.mistakes.seams import Function, configured, exchanged, several, wrapped
from reimpl.moe import Experts, GroupedRouter, TopKRouter

KIND = "routing weights"
ALL = (*SOFTMAX_ROUTED, *LATENT)
WEIGHTED = ("output", "experts", "gate")


def weigh_biased(weigh: Function) -> Function:
    return lambda self, scores, experts: weigh(self, scores + self.e_score_correction_bias, experts)


def softmax_again(self: Any, likeliest: Tensor) -> Tensor:
    return likeliest.softmax(-1)


def weights_of(change: Function) -> Function:
    """Experts get other weights."""
    return lambda forward: lambda self, x, experts, weights: forward(self, x, experts, change(weights))


MISTAKES = (
    Mistake(
        "weighs experts by biased scores",
        wrapped(GroupedRouter, "weigh", weigh_biased),
        (Place(LATENT, EXPERTS, "b1 s2"),),
        WEIGHTED,
        "any correction bias other than 0",
        source="vllm-project/vllm#12002",
    ),
    Mistake(
        "never lets the weights of the chosen sum to 1",
        several(
            configured(lambda fields: {"norm_topk_prob": False}),
            exchanged(TopKRouter, "weigh", lambda self, likeliest: likeliest),
        ),
        (
            Place((*LATENT, *SOMETIMES_RENORMALISING), EXPERTS, "norm=yes b1 s2", "norm=no b1 s2"),
            Place(RENORMALISING, EXPERTS, "b1 s2"),
        ),
        WEIGHTED,
        "any token, where the configuration renormalises",
    ),
    Mistake(
        "always lets the weights of the chosen sum to 1",
        configured(lambda fields: {"norm_topk_prob": True}),
        (Place((*LATENT, *SOMETIMES_RENORMALISING), EXPERTS, "norm=no b1 s2", "norm=yes b1 s2"),),
        WEIGHTED,
        "norm_topk_prob off",
    ),
    Mistake(
        "takes a softmax over the probabilities of the chosen",
        exchanged(TopKRouter, "weigh", softmax_again),
        (
            Place(RENORMALISING, EXPERTS, "b1 s2", "experts=8/1 b1 s2"),
            Place(SOMETIMES_RENORMALISING, EXPERTS, "b1 s2"),
        ),
        WEIGHTED,
        "any token; where weights sum to 1, one with more than one expert for a token",
    ),
    Mistake(
        "applies the scaling factor twice",
        configured(lambda fields: {"routed_scaling_factor": fields.get("routed_scaling_factor", 1.0) ** 2}),
        (Place(LATENT, EXPERTS, "b1 s2", "factor=1.0 b1 s2"),),
        WEIGHTED,
        "routed_scaling_factor other than 1",
        source="vllm-project/vllm#24118",
    ),
    Mistake(
        "drops the scaling factor",
        configured(lambda fields: {"routed_scaling_factor": 1.0}),
        (Place(LATENT, EXPERTS, "b1 s2", "factor=1.0 b1 s2"),),
        WEIGHTED,
        "routed_scaling_factor other than 1",
        source="vllm-project/vllm#24118",
        remedy="weights |= {name: w * factor for name, w in weights.items()"
        " if '.experts.' in name and 'down_proj' in name}",
    ),
    Mistake(
        "weighs all chosen experts alike",
        wrapped(Experts, "forward", weights_of(lambda weights: torch.ones_like(weights) / weights.shape[1])),
        (
            Place(RENORMALISING, EXPERTS, "b1 s2", "experts=8/1 b1 s2"),
            Place((*LATENT, *SOMETIMES_RENORMALISING), EXPERTS, "b1 s2"),
        ),
        WEIGHTED,
        "any token with more than one expert",
    ),
    Mistake(
        "gives the weights to the chosen in the reverse order",
        wrapped(Experts, "forward", weights_of(lambda weights: weights.flip(-1))),
        (
            Place(SOFTMAX_ROUTED, EXPERTS, "b1 s2", "experts=8/1 b1 s2"),
            Place(LATENT, EXPERTS, "b1 s2", "experts=8/4/4/1 b1 s2"),
        ),
        WEIGHTED,
        "more than one expert for a token",
    ),
)
