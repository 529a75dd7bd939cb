"""The function between the two matrices of a feed-forward layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import BERT, BLOCKS, FEED_FORWARD, GATED, GPT2
from parity.mistakes.seams import Fields, configured, exchanged, exchanged_in
from reimpl import feedforward
from reimpl.feedforward import GatedFeedForward, gelu_tanh, quick_gelu

KIND = "activation"
PARTS = ("act_fn", "act", "intermediate_act_fn", "input of down_proj", "input of c_proj", "output", "input of dense")
INTERMEDIATE = ("intermediate", *BLOCKS)
TANH, EXACT = ("gelu_pytorch_tanh", "gelu_new"), ("gelu",)


def take(name: str) -> Fields:
    return {"hidden_act": name, "activation_function": name}


def activate_product(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act(self.gate_proj(x) * self.up_proj(x)))


def activate_both(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act(self.gate_proj(x)) * self.act(self.up_proj(x)))


def add_for_multiply(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act(self.gate_proj(x)) + self.up_proj(x))


MISTAKES = (
    Mistake(
        "computes the exact GELU for the one by tanh",
        exchanged_in(feedforward.ACTIVATIONS, **dict.fromkeys(TANH, F.gelu)),
        (
            Place(GATED, FEED_FORWARD, "act=gelu_pytorch_tanh b1 s3", "act=gelu b1 s4"),
            Place(GPT2, FEED_FORWARD, "act=gelu_new b1 s3", "act=gelu b1 s4"),
            Place(BERT, INTERMEDIATE, "act=gelu_new b1 s3", "act=gelu b1 s4"),
        ),
        PARTS,
        "numbers of size 1 to 3 before the activation, and GELU by tanh",
        source="OpenNMT/CTranslate2#1658",
    ),
    Mistake(
        "computes GELU by tanh for the exact one",
        exchanged_in(feedforward.ACTIVATIONS, **dict.fromkeys(EXACT, gelu_tanh)),
        (
            Place((*GATED, *GPT2), FEED_FORWARD, "act=gelu b1 s3", "act=relu b1 s4"),
            Place(BERT, INTERMEDIATE, "act=gelu b1 s3", "act=relu b1 s4"),
        ),
        PARTS,
        "numbers of size 1 to 3 before the activation, and exact GELU",
        source="OpenNMT/CTranslate2#1658",
    ),
    Mistake(
        "computes the quick GELU for the exact one",
        exchanged_in(feedforward.ACTIVATIONS, **dict.fromkeys(EXACT, quick_gelu)),
        (
            Place((*GATED, *GPT2), FEED_FORWARD, "act=gelu b1 s3", "act=relu b1 s4"),
            Place(BERT, INTERMEDIATE, "act=gelu b1 s3", "act=relu b1 s4"),
        ),
        PARTS,
        "exact GELU",
    ),
    Mistake(
        "takes the default for the activation that the configuration names",
        configured(lambda fields: {"hidden_act": "silu", "activation_function": "gelu_new"}),
        (
            Place(GATED, FEED_FORWARD, "act=relu b1 s3", "b1 s4"),
            Place(GPT2, FEED_FORWARD, "act=relu b1 s3", "b1 s4"),
        ),
        PARTS,
        "an activation other than the default",
    ),
    Mistake(
        "takes ReLU for the activation",
        configured(lambda fields: take("relu")),
        (
            Place((*GATED, *GPT2), FEED_FORWARD, "b1 s3", "act=relu b1 s4"),
            Place(BERT, INTERMEDIATE, "b1 s3", "act=relu b1 s4"),
        ),
        PARTS,
        "an activation other than ReLU",
    ),
    Mistake(
        "leaves out the activation",
        configured(lambda fields: take("linear")),
        (Place((*GATED, *GPT2), FEED_FORWARD, "b1 s3"), Place(BERT, INTERMEDIATE, "b1 s3")),
        PARTS,
        "any input",
    ),
    Mistake(
        "applies the activation to the product of gate and up",
        exchanged(GatedFeedForward, "forward", activate_product),
        (Place(GATED, FEED_FORWARD, "b1 s3"),),
        PARTS,
        "any input",
    ),
    Mistake(
        "applies the activation to up as well",
        exchanged(GatedFeedForward, "forward", activate_both),
        (Place(GATED, FEED_FORWARD, "b1 s3"),),
        PARTS,
        "any input",
    ),
    Mistake(
        "adds up to the gate where it should multiply",
        exchanged(GatedFeedForward, "forward", add_for_multiply),
        (Place(GATED, FEED_FORWARD, "b1 s3"),),
        PARTS,
        "any input",
    ),
)
