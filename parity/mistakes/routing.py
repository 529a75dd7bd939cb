"""Which experts are chosen for a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import EXPERTS, LATENT, RENORMALISING, SOFTMAX_ROUTED, SOMETIMES_RENORMALISING
from parity.mistakes.seams import Function, built, exchanged, narrow, several, wrapped
from reimpl import moe
from reimpl.moe import GroupedRouter, TopKRouter
from reimpl.precision import wide

KIND = "routing"
SEEN = ("routing", "output", "cache")
GROUPS = (Place(LATENT, EXPERTS, "experts=8/4/2/3 b2 s4", "b2 s4"),)
ALL = (*SOFTMAX_ROUTED, *LATENT)
CHOSEN = ("gate", "input of experts", "experts", "output", "act_fn", "input of gate_proj")
FEWER = (
    Place(SOFTMAX_ROUTED, EXPERTS, "b2 s4", "experts=8/1 b2 s4"),
    Place(LATENT, EXPERTS, "b2 s4", "experts=8/4/4/1 b2 s4"),
)
SEVERAL_GROUPS = "more groups than are kept"


def without_bias(choose: Function) -> Function:
    return lambda self, biased: choose(self, biased - self.e_score_correction_bias)


def against_the_bias(choose: Function) -> Function:
    return lambda self, biased: choose(self, biased - 2 * self.e_score_correction_bias)


def in_turn(limited: Function) -> Function:
    """Expert e belongs to group e % groups."""

    def call(self: Any, biased: Tensor) -> Tensor:
        order = torch.arange(biased.shape[-1]).unflatten(0, (-1, self.groups)).T.flatten()
        return limited(self, biased[:, order])[:, order.argsort()]

    return call


def more(count: int) -> Function:
    """So many more experts for a token, as far as there are any."""

    def change(router: Any) -> None:
        router.chosen = min(max(1, router.chosen + count), len(router.weight))

    return change


def lowest(self: Any, biased: Tensor) -> Tensor:
    return biased.topk(self.chosen, dim=-1, largest=False).indices


def by_the_one_before(forward: Function) -> Function:
    """Every token goes where the one before it should."""
    return lambda self, x: forward(self, x.roll(1, 0))


MISTAKES = (
    Mistake(
        "fills excluded groups with 0",
        exchanged(moe, "NEVER_CHOSEN", 0.0),
        (Place(LATENT, EXPERTS, "experts=8/4/2/3 b2 s8", "b2 s4"),),
        CHOSEN,
        "biased scores below 0, and more groups than are kept",
        SEEN,
        source="huggingface/transformers#45440",
    ),
    Mistake(
        "scores a group by its best expert",
        exchanged(GroupedRouter, "rate", lambda self, grouped: grouped.amax(-1)),
        (Place(LATENT, EXPERTS, "experts=12/3/2/5 b3 s8", "b2 s4"),),
        CHOSEN,
        SEVERAL_GROUPS,
        SEEN,
    ),
    Mistake(
        "scores a group by the sum of all its experts",
        exchanged(GroupedRouter, "rate", lambda self, grouped: grouped.sum(-1)),
        (Place(LATENT, EXPERTS, "experts=12/3/2/5 b3 s8", "experts=8/4/2/3 b2 s4"),),
        CHOSEN,
        "more groups than are kept, of more than two experts each",
        SEEN,
    ),
    Mistake(
        "puts experts into groups in turn",
        wrapped(GroupedRouter, "limited", in_turn),
        GROUPS,
        CHOSEN,
        SEVERAL_GROUPS,
        SEEN,
    ),
    Mistake(
        "drops the limit on groups",
        exchanged(GroupedRouter, "limited", lambda self, biased: biased),
        (Place(LATENT, EXPERTS, "experts=8/4/2/3 b3 s8", "b2 s4"),),
        CHOSEN,
        SEVERAL_GROUPS,
        SEEN,
    ),
    Mistake(
        "chooses experts without the correction bias",
        wrapped(GroupedRouter, "choose", without_bias),
        (Place(LATENT, EXPERTS, "b3 s8"),),
        CHOSEN,
        "any number of tokens, as biases differ by as much as scores",
        SEEN,
    ),
    Mistake(
        "subtracts the correction bias",
        wrapped(GroupedRouter, "choose", against_the_bias),
        (Place(LATENT, EXPERTS, "b3 s8"),),
        CHOSEN,
        "any number of tokens, as biases differ by as much as scores",
        SEEN,
    ),
    Mistake(
        "scores experts by a softmax for sigmoids",
        exchanged(GroupedRouter, "score", lambda self, logits: logits.softmax(-1)),
        (Place(LATENT, EXPERTS, "b3 s8"),),
        CHOSEN,
        "any token",
        SEEN,
    ),
    Mistake(
        "scores experts by sigmoids for a softmax",
        exchanged(TopKRouter, "score", lambda self, logits: logits.to(wide(logits)).sigmoid()),
        (
            Place(RENORMALISING, EXPERTS, "b3 s4", "experts=8/1 b1 s4"),
            Place(SOMETIMES_RENORMALISING, EXPERTS, "b3 s4", "norm=yes experts=8/1 b1 s4"),
        ),
        CHOSEN,
        "more than one expert for a token: the order is the same, the weights are not",
        SEEN,
    ),
    Mistake(
        "chooses one expert more",
        several(built(TopKRouter, more(1)), built(GroupedRouter, more(1))),
        (Place(ALL, EXPERTS, "b2 s4"),),
        CHOSEN,
        "any token",
        SEEN,
    ),
    Mistake(
        "chooses one expert fewer",
        several(built(TopKRouter, more(-1)), built(GroupedRouter, more(-1))),
        FEWER,
        CHOSEN,
        "more than one expert for a token",
        SEEN,
    ),
    Mistake(
        "chooses the experts with the lowest scores",
        exchanged(GroupedRouter, "choose", lowest),
        (Place(LATENT, EXPERTS, "b2 s4"),),
        CHOSEN,
        "any token",
        SEEN,
    ),
    Mistake(
        "routes every token by the one before it",
        several(*(wrapped(router, "forward", by_the_one_before) for router in (TopKRouter, GroupedRouter))),
        (Place(ALL, EXPERTS, "b2 s4", "b1 s1"),),
        (*CHOSEN, "input of gate"),
        "more than one token",
        SEEN,
    ),
    Mistake(
        "routes in the model's dtype",
        narrow(moe),
        (Place(SOFTMAX_ROUTED, EXPERTS, "b2 s4", "b2 s4 f32"), Place(LATENT, EXPERTS, "b2 s4", "b2 s4 f32")),
        ("softmax", "router score"),
        "half precision",
        ("routing", "output", "cache", "precision"),
        dtype="bf16",
    ),
)
