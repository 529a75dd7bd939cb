"""What becomes of a token at the experts it was sent to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import EXPERTS, LATENT, RENORMALISING, SOFTMAX_ROUTED, SOMETIMES_RENORMALISING
from parity.mistakes.seams import Function, Weights, built, loaded, several, swapped, wrapped
from reimpl.deepseek_v3 import DeepseekV3MoE
from reimpl.moe import Experts

KIND = "experts"
ALL = (*SOFTMAX_ROUTED, *LATENT)
PARTS = ("act_fn", "output", "experts", "input of experts", "shared_experts", "input of down_proj")


def shift(forward: Function) -> Function:
    return lambda self, x, experts, weights: forward(self, x, (experts + 1) % len(self.down_proj), weights)


def weigh_inputs(forward: Function) -> Function:
    """Each choice by itself: what goes into an expert is multiplied by the weight, not what comes out of it."""

    def call(self: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        each = zip(experts.split(1, dim=1), weights.to(x.dtype).split(1, dim=1), strict=True)
        return torch.stack([forward(self, x * weight, expert, torch.ones_like(weight)) for expert, weight in each]).sum(
            0
        )

    return call


def by_slot(table: Tensor) -> Tensor:
    """[tokens, chosen] read as though it were [chosen, tokens]."""
    return table.T.reshape(table.shape)


def mix_slots(forward: Function) -> Function:
    return lambda self, x, experts, weights: forward(self, x, by_slot(experts), by_slot(weights))


def mix_slots_of_weights(forward: Function) -> Function:
    return lambda self, x, experts, weights: forward(self, x, experts, by_slot(weights))


def keep_the_last(forward: Function) -> Function:
    """What one expert puts out takes the place of what the one before it did."""
    return lambda self, x, experts, weights: forward(self, x, experts[:, -1:], weights[:, -1:])


def drop_beyond(capacity: int) -> Function:
    """An expert takes so many choices; those that come later are lost."""

    def wrap(forward: Function) -> Function:
        def call(self: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
            taken = torch.nn.functional.one_hot(experts.flatten(), len(self.down_proj))
            place = (taken.cumsum(0) * taken).sum(-1).view(experts.shape)
            return forward(self, x, experts, weights * (place <= capacity))

        return call

    return wrap


def in_order_of_names(weights: Weights, config: Any) -> Weights:
    """Experts are read as their names sort: 0, 1, 10, 11, 2, ..."""
    given = dict(weights)
    stems = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for stem in stems:
        names = [name for name in weights if name.startswith(f"{stem}.experts.")]
        numbers = sorted({name.removeprefix(f"{stem}.experts.").partition(".")[0] for name in names})
        for name in names:
            number, _, rest = name.removeprefix(f"{stem}.experts.").partition(".")
            given[name] = weights[f"{stem}.experts.{numbers[int(number)]}.{rest}"]
    return given


def scale_shared_too(moe: Any) -> None:
    moe.shared_experts.register_forward_hook(lambda module, args, out: out * moe.gate.factor)


def drop_shared(moe: Any) -> None:
    moe.shared_experts.register_forward_hook(lambda module, args, out: torch.zeros_like(out))


MISTAKES = (
    Mistake(
        "swaps gate and up in the experts",
        several(swapped("experts.0.w1", "experts.0.w3"), swapped("experts.0.gate_proj", "experts.0.up_proj")),
        (Place(ALL, EXPERTS, "b3 s4"),),
        PARTS,
        "any token that is sent to such an expert",
        remedy="weights |= {name.replace('up_proj', 'gate_proj') if 'up_proj' in name else"
        " name.replace('gate_proj', 'up_proj'): w for name, w in weights.items() if '.experts.' in name}",
    ),
    Mistake(
        "sends tokens to the expert after the one chosen",
        wrapped(Experts, "forward", shift),
        (Place(ALL, EXPERTS, "b1 s2"),),
        PARTS,
        "any token",
    ),
    Mistake(
        "reads experts in the order of their names as text",
        loaded(in_order_of_names),
        (
            Place(SOFTMAX_ROUTED, ("moe",), "many=64 b3 s4", "b2 s4"),
            Place(LATENT, EXPERTS, "experts=12/3/2/5 b3 s4", "b2 s4"),
        ),
        PARTS,
        "more than ten experts",
    ),
    Mistake(
        "applies the weight to what goes into an expert",
        wrapped(Experts, "forward", weigh_inputs),
        (
            Place(RENORMALISING, EXPERTS, "b1 s2", "experts=8/1 b1 s2"),
            Place((*LATENT, *SOMETIMES_RENORMALISING), EXPERTS, "b1 s2"),
        ),
        PARTS,
        "any token whose weights are not 1",
    ),
    Mistake(
        "takes token for slot among the choices",
        wrapped(Experts, "forward", mix_slots),
        (Place(SOFTMAX_ROUTED, EXPERTS, "b2 s2", "b1 s1"), Place(LATENT, EXPERTS, "b2 s2", "b1 s1")),
        PARTS,
        "more than one token, and more than one expert for each",
    ),
    Mistake(
        "takes token for slot among the weights",
        wrapped(Experts, "forward", mix_slots_of_weights),
        (Place(ALL, EXPERTS, "b2 s2", "b1 s1"),),
        PARTS,
        "more than one token, and more than one expert for each",
    ),
    Mistake(
        "keeps the output of the last expert, and loses those before",
        wrapped(Experts, "forward", keep_the_last),
        (
            Place(SOFTMAX_ROUTED, EXPERTS, "b1 s2", "experts=8/1 b1 s2"),
            Place(LATENT, EXPERTS, "b1 s2", "experts=8/4/4/1 b1 s2"),
        ),
        PARTS,
        "more than one expert for a token",
    ),
    Mistake(
        "drops tokens beyond the capacity of an expert",
        wrapped(Experts, "forward", drop_beyond(4)),
        (Place(ALL, EXPERTS, "b3 s8", "b1 s4"),),
        PARTS,
        "more than four choices of the same expert",
    ),
    Mistake(
        "drops the shared experts",
        built(DeepseekV3MoE, drop_shared),
        (Place(LATENT, EXPERTS, "b1 s2"),),
        PARTS,
        "any token",
    ),
    Mistake(
        "applies the scaling factor to the shared experts too",
        built(DeepseekV3MoE, scale_shared_too),
        (Place(LATENT, EXPERTS, "b1 s2", "factor=1.0 b1 s2"),),
        PARTS,
        "routed_scaling_factor other than 1",
    ),
)
