"""The function between the two matrices of a feed-forward layer."""

from __future__ import annotations

from torch.nn import functional as F

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import BLOCKS, GATED
from parity.mistakes.seams import configured, exchanged_in
from reimpl import feedforward

KIND = "activation"
GATED_PARTS = ("act_fn", "input of down_proj")

MISTAKES = (
    Mistake(
        "computes the exact GELU for the one by tanh",
        exchanged_in(feedforward.ACTIVATIONS, gelu_pytorch_tanh=F.gelu),
        (Place(GATED, ("mlp", *BLOCKS), "act=gelu_pytorch_tanh b1 s3", "act=gelu b1 s4"),),
        GATED_PARTS,
        "numbers of size 1 to 3 before the activation, and GELU by tanh",
        source="OpenNMT/CTranslate2#1658",
    ),
    Mistake(
        "ignores hidden_act",
        configured(lambda fields: {"hidden_act": "silu"}),
        (Place(GATED, ("mlp", *BLOCKS), "act=relu b1 s3", "b1 s4"),),
        GATED_PARTS,
        "an activation other than the default",
    ),
)
