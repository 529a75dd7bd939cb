"""Mixture of experts: a router sends each token to a few of many feed-forward layers (Shazeer et al. 2017, 1701.06538).

Tokens are flat here, without batch. Below, e is an expert, and c one of the choices of a token.

Two routers. Mixtral's takes a softmax over all experts, keeps the k likeliest and lets their weights sum to 1. That of
DeepSeek-V3 scores every expert by itself with a sigmoid, adds a bias for the choice alone, and chooses within the
groups of experts that score best.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.feedforward import activation
from reimpl.precision import wide

NEVER_CHOSEN = -torch.inf
"""The score of an expert in a group that was not chosen: any number might still be among the highest."""


class Routing(NamedTuple):
    """What a router decides: its logits, the experts chosen, and the weights of their outputs."""

    logits: Float[Tensor, "tokens all_experts"]
    experts: Int[Tensor, "tokens chosen"]
    weights: Float[Tensor, "tokens chosen"]


class TopKRouter(nn.Module):
    """p = softmax(W x); the k largest, renormalised (Mixtral, Jiang et al. 2024, arXiv:2401.04088, section 2.1).

    A softmax over the k largest logits gives the same weights. Without `renormalise` they are the probabilities among
    all experts. Logits have the dtype of `x`, weights at least float32.
    """

    def __init__(self, size: int, experts: int, chosen: int, renormalise: bool = True) -> None:
        super().__init__()
        self.chosen, self.renormalise = chosen, renormalise
        self.weight = nn.Parameter(torch.empty(experts, size))
        nn.init.normal_(self.weight, std=size**-0.5)

    def forward(self, x: Float[Tensor, "tokens size"]) -> Routing:
        logits = F.linear(x, self.weight)
        likeliest, experts = self.score(logits).topk(self.chosen, dim=-1)
        return Routing(logits, experts, self.weigh(likeliest))

    def score(self, logits: Float[Tensor, "tokens all_experts"]) -> Float[Tensor, "tokens all_experts"]:
        return logits.softmax(-1, dtype=wide(logits))

    def weigh(self, likeliest: Float[Tensor, "tokens chosen"]) -> Float[Tensor, "tokens chosen"]:
        return likeliest / likeliest.sum(-1, keepdim=True) if self.renormalise else likeliest


class GroupedRouter(nn.Module):
    """s = sigmoid(W x); chosen by s + b in the best groups, weighted by s alone (DeepSeek-V3, 2412.19437, eq. 13-16).

    A group scores the sum of its two best experts; those of other groups cannot be chosen, whatever their sign (section
    2.1.2). The bias balances the load of the experts; no gradient reaches it. Everything is in at least float32,
    parameters too, when the model is converted to half precision.
    """

    wide_parameters = True
    e_score_correction_bias: Tensor

    def __init__(
        self,
        size: int,
        experts: int,
        chosen: int,
        groups: int = 1,
        chosen_groups: int = 1,
        renormalise: bool = True,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.chosen, self.groups, self.chosen_groups = chosen, groups, chosen_groups
        self.renormalise, self.factor = renormalise, factor
        self.weight = nn.Parameter(torch.empty(experts, size))
        nn.init.normal_(self.weight, std=size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x: Float[Tensor, "tokens size"]) -> Routing:
        dtype = wide(x)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = self.score(logits)
        experts = self.choose(scores.detach() + self.e_score_correction_bias)
        return Routing(logits, experts, self.weigh(scores, experts))

    def score(self, logits: Float[Tensor, "tokens all_experts"]) -> Float[Tensor, "tokens all_experts"]:
        return logits.sigmoid()

    def choose(self, biased: Float[Tensor, "tokens all_experts"]) -> Int[Tensor, "tokens chosen"]:
        """The best experts of the best groups."""
        return self.limited(biased).topk(self.chosen, dim=-1).indices

    def limited(self, biased: Float[Tensor, "tokens all_experts"]) -> Float[Tensor, "tokens all_experts"]:
        """Scores by which no expert outside of the best groups is chosen."""
        if self.chosen_groups == self.groups:
            return biased
        grouped = biased.unflatten(-1, (self.groups, -1))
        best = self.rate(grouped).topk(self.chosen_groups, dim=-1).indices
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(others[..., None], NEVER_CHOSEN).flatten(-2)

    def rate(self, grouped: Float[Tensor, "tokens groups group"]) -> Float[Tensor, "tokens groups"]:
        """What a group scores."""
        return grouped.topk(2, dim=-1).values.sum(-1)

    def weigh(
        self, scores: Float[Tensor, "tokens all_experts"], experts: Int[Tensor, "tokens chosen"]
    ) -> Float[Tensor, "tokens chosen"]:
        """The weights of those chosen."""
        weights = scores.gather(-1, experts)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # zero where all scores underflow
        return weights * self.factor


class Experts(nn.Module):
    """sum_c w_c down_e(act(gate_e(x)) * up_e(x)) over the experts e chosen for a token; weights of all experts stacked.

    The rows of `gate_up_proj` are the gate's, then those of up. By default tokens are sorted by expert, so each
    multiplies once; `dispatch` may be `dense` instead: every expert computes every token, as accelerators like it.
    """

    dispatch = "sorted"

    def __init__(self, experts: int, size: int, hidden: int, act: str) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, size))
        self.down_proj = nn.Parameter(torch.empty(experts, size, hidden))
        nn.init.normal_(self.gate_up_proj, std=size**-0.5)
        nn.init.normal_(self.down_proj, std=hidden**-0.5)
        self.act = activation(act)

    def forward(
        self,
        x: Float[Tensor, "tokens size"],
        experts: Int[Tensor, "tokens chosen"],
        weights: Float[Tensor, "tokens chosen"],
    ) -> Float[Tensor, "tokens size"]:
        if self.dispatch == "dense":
            return self._densely(x, experts, weights).to(x.dtype)
        several = self._of_one if len(x) == 1 else self._of_many
        return several(x, experts, weights).to(x.dtype)

    def _densely(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """What an expert puts out for a token that did not choose it weighs nothing."""
        of_expert = weights.new_zeros(len(x), len(self.down_proj)).scatter_add(-1, experts, weights)
        each = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = torch.stack([self._expert(x, gate_up, down) for gate_up, down in each])
        return torch.einsum("te,etd->td", of_expert, outputs.to(weights.dtype))

    def _of_one(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """A single token needs no sorting, and all its experts' activations take one step."""
        chosen, gate_up, down = experts[0].tolist(), self.gate_up_proj, self.down_proj
        gate, up = torch.cat([F.linear(x, gate_up[index]) for index in chosen]).chunk(2, dim=-1)
        hidden = (self.act(gate) * up).split(1)
        outputs = [F.linear(part, down[index]) for part, index in zip(hidden, chosen, strict=True)]
        return weights @ torch.cat(outputs).to(weights.dtype)

    def _of_many(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert; what comes out is added to the token it belongs to, in the weights' dtype."""
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        sizes = experts.flatten().bincount(minlength=len(self.down_proj)).tolist()
        # Unbound at once: the gradient of one expert taken out of the stack would be as large as the stack.
        each = zip(x[tokens].split(sizes), self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = torch.cat([self._expert(part, gate_up, down) for part, gate_up, down in each if len(part)])
        weighted = outputs * weights.flatten()[order, None]
        return torch.zeros_like(x, dtype=weights.dtype).index_add(0, tokens, weighted)

    def _expert(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(self.act(gate) * up, down)


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Float[Tensor, "tokens all_experts"]]]:
    """Collects the logits of every router of a model, in the order of its layers, while the context lasts."""
    logits: list[Tensor] = []

    def note(router: nn.Module, args: tuple[Tensor], routing: Routing) -> None:
        logits.append(routing.logits)

    routers = [part for part in model.modules() if isinstance(part, TopKRouter | GroupedRouter)]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def load_balancing_loss(
    logits: Sequence[Float[Tensor, "tokens all_experts"]],
    chosen: int,
    valid: Bool[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, ""]:
    """experts * sum_e f_e P_e, least where all experts are used alike (Switch, Fedus et al. 2021, 2101.03961, eq. 4-6).

    f_e is how many of a token's choices are the expert e, and P_e the probability it has, both averaged over all tokens
    of all layers. `valid` tells tokens from padding, which does not count.
    """
    probabilities = torch.cat(list(logits)).softmax(-1)
    experts = probabilities.topk(chosen, dim=-1).indices
    used = torch.zeros_like(probabilities, dtype=wide(probabilities)).scatter(-1, experts, 1)
    if valid is not None:
        counted = valid.flatten().repeat(len(logits))
        probabilities, used = probabilities[counted], used[counted]
    return probabilities.shape[-1] * (used.mean(0) * probabilities.mean(0)).sum()
