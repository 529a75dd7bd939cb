"""Mixtures of experts in which every expert computes every token, and a weight of zero takes most of that back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parity.meta.second.grouped import Gain, Projection
from parity.meta.second.part import ACTIVATIONS, Part, empty, linear, wide


class Stack(nn.Module):
    """The matrices of all experts."""

    def __init__(self, experts: int, size: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = empty(experts, 2 * hidden, size), empty(experts, size, hidden)


class DenseExperts(Part):
    """The sum over all experts of weight times down(act(gate(x)) * up(x))."""

    MAKES = frozenset(
        {
            "swaps gate and up in the experts",
            "sends tokens to the expert after the one chosen",
            "reads experts in the order of their names as text",
            "applies the weight to what goes into an expert",
            "takes token for slot among the choices",
            "takes token for slot among the weights",
            "keeps the output of the last expert, and loses those before",
            "drops tokens beyond the capacity of an expert",
            "chooses one expert more",
            "chooses one expert fewer",
            "routes every token by the one before it",
            "never lets the weights of the chosen sum to 1",
            "weighs all chosen experts alike",
            "gives the weights to the chosen in the reverse order",
        }
    )

    def count(self, chosen: int, experts: int) -> int:
        """How many experts a token is sent to."""
        chosen += self.does("chooses one expert more") - self.does("chooses one expert fewer")
        return min(max(1, chosen), experts)

    def routed(self, tokens: Tensor) -> Tensor:
        """What the router reads, [tokens, size]."""
        if self.does("routes every token by the one before it"):
            return torch.cat((tokens[-1:], tokens[:-1]))
        return tokens

    def mixed(self, x: Tensor, stack: Stack, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
        """[tokens, size] of choices and weights, [tokens, chosen]."""
        chosen, weights = self.dispatched(chosen, weights, len(stack.down_proj))
        order, total = self.order(len(stack.down_proj)), torch.zeros_like(x, dtype=weights.dtype)
        for number, read in enumerate(order):
            rows = stack.gate_up_proj[read]
            matrices = (rows[: len(rows) // 2], rows[len(rows) // 2 :], stack.down_proj[read])
            if self.does("swaps gate and up in the experts") and read == 0:  # in the first one, as the catalogue does
                matrices = (matrices[1], matrices[0], matrices[2])
            share = torch.where(chosen == number, weights, 0).sum(1, keepdim=True)
            if self.does("applies the weight to what goes into an expert"):
                total = total + self.expert(x * share.to(x.dtype), *matrices, act)
            else:
                total = total + share * self.expert(x, *matrices, act)
        return total.to(x.dtype)

    def dispatched(self, chosen: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Choices and weights as they reach the experts."""
        if self.does("sends tokens to the expert after the one chosen"):
            chosen = (chosen + 1) % experts
        if self.does("weighs all chosen experts alike"):
            weights = torch.full_like(weights, 1 / weights.shape[1])
        if self.does("gives the weights to the chosen in the reverse order"):
            weights = weights[:, list(range(weights.shape[1]))[::-1]]
        if self.does("takes token for slot among the choices"):
            chosen, weights = by_slot(chosen), by_slot(weights)
        if self.does("takes token for slot among the weights"):
            weights = by_slot(weights)
        if self.does("keeps the output of the last expert, and loses those before"):
            chosen, weights = chosen[:, -1:], weights[:, -1:]
        if self.does("drops tokens beyond the capacity of an expert"):
            weights = weights * self.places(chosen)
        return chosen, weights

    @staticmethod
    def places(chosen: Tensor) -> Tensor:
        """Which choices come early enough: the first four of each expert, token by token."""
        taken: dict[int, int] = {}
        early = []
        for expert in chosen.flatten().tolist():
            taken[expert] = taken.get(expert, 0) + 1
            early.append(taken[expert] <= 4)
        return torch.tensor(early).view(chosen.shape)

    def order(self, experts: int) -> list[int]:
        """Which expert stands in the place of each."""
        numbers = list(range(experts))
        return sorted(numbers, key=str) if self.does("reads experts in the order of their names as text") else numbers

    def expert(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
        return linear(ACTIVATIONS[act](linear(x, gate)) * linear(x, up), down)


def by_slot(table: Tensor) -> Tensor:
    """[tokens, chosen] written column by column into a table that is read row by row."""
    columns = [table[:, slot] for slot in range(table.shape[1])]
    return torch.cat(columns).reshape(table.shape)


class SoftmaxExperts(DenseExperts):
    """Mixtral's: the likeliest by softmax, their weights summing to 1."""

    MAKES = DenseExperts.MAKES | {
        "scores experts by sigmoids for a softmax",
        "takes a softmax over the probabilities of the chosen",
    }

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.config = config
        self.gate = Gain(1)
        self.gate.weight = empty(config.num_local_experts, config.hidden_size)
        self.experts = Stack(config.num_local_experts, config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        powers = wide(linear(self.routed(tokens), self.gate.weight)).exp()
        if self.does("scores experts by sigmoids for a softmax"):
            powers = powers / (1 + powers)
        else:
            powers = powers / powers.sum(1, keepdim=True)
        chosen = torch.topk(powers, self.count(self.config.num_experts_per_tok, powers.shape[1])).indices
        weights = powers.gather(1, chosen)
        if self.does("takes a softmax over the probabilities of the chosen"):
            weights = weights.exp()
        if not self.does("never lets the weights of the chosen sum to 1"):
            weights = weights / weights.sum(1, keepdim=True)
        return self.mixed(tokens, self.experts, chosen, weights, self.config.hidden_act).reshape(x.shape)


class SigmoidExperts(DenseExperts):
    """DeepSeek-V3's: the best of the best groups by biased sigmoids, weighted without the bias; and shared ones."""

    MAKES = DenseExperts.MAKES | {
        "drops the shared experts",
        "applies the scaling factor to the shared experts too",
        "fills excluded groups with 0",
        "scores a group by its best expert",
        "scores a group by the sum of all its experts",
        "puts experts into groups in turn",
        "drops the limit on groups",
        "chooses experts without the correction bias",
        "subtracts the correction bias",
        "scores experts by a softmax for sigmoids",
        "chooses the experts with the lowest scores",
        "weighs experts by biased scores",
        "always lets the weights of the chosen sum to 1",
        "applies the scaling factor twice",
        "drops the scaling factor",
    }
    gate: Any
    shared_experts: Any

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.config, experts, hidden = config, config.n_routed_experts, config.moe_intermediate_size
        self.gate = nn.Module()
        self.gate.wide_parameters = True
        self.gate.weight = empty(experts, config.hidden_size)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.experts = Stack(experts, config.hidden_size, hidden)
        self.shared_experts, shared = nn.Module(), hidden * config.n_shared_experts
        self.shared_experts.gate_proj = Projection(shared, config.hidden_size, False)
        self.shared_experts.up_proj = Projection(shared, config.hidden_size, False)
        self.shared_experts.down_proj = Projection(config.hidden_size, shared, False)

    def forward(self, x: Tensor) -> Tensor:
        tokens, config = x.reshape(-1, x.shape[-1]), self.config
        read = wide(self.routed(tokens))
        logits = linear(read, self.gate.weight.to(read.dtype))
        scores = 1 / (1 + (-logits).exp())
        if self.does("scores experts by a softmax for sigmoids"):
            scores = logits.exp() / logits.exp().sum(1, keepdim=True)
        chosen = self.chosen(scores.detach())
        biased = scores + self.gate.e_score_correction_bias
        weights = (biased if self.does("weighs experts by biased scores") else scores).gather(1, chosen)
        always = self.does("always lets the weights of the chosen sum to 1")
        if (config.norm_topk_prob or always) and not self.does("never lets the weights of the chosen sum to 1"):
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        factor = config.routed_scaling_factor
        if self.does("applies the scaling factor twice"):
            factor = factor * factor
        if self.does("drops the scaling factor"):
            factor = 1.0
        routed = self.mixed(tokens, self.experts, chosen, weights * factor, config.hidden_act)
        if self.does("drops the shared experts"):
            return routed.reshape(x.shape)
        gate, up, down = (getattr(self.shared_experts, f"{name}_proj").weight for name in ("gate", "up", "down"))
        shared = self.expert(tokens, gate, up, down, config.hidden_act)
        if self.does("applies the scaling factor to the shared experts too"):
            shared = shared * config.routed_scaling_factor
        return (routed + shared).reshape(x.shape)

    def chosen(self, scores: Tensor) -> Tensor:
        """The experts of each token, [tokens, chosen]."""
        config, count = self.config, self.count(self.config.num_experts_per_tok, scores.shape[1])
        bias = self.gate.e_score_correction_bias
        if self.does("chooses experts without the correction bias"):
            bias = bias * 0
        if self.does("subtracts the correction bias"):
            bias = -bias
        biased = scores + bias
        if self.does("chooses the experts with the lowest scores"):
            return torch.topk(biased, count, largest=False).indices
        if config.topk_group == config.n_group or self.does("drops the limit on groups"):
            return torch.topk(biased, count).indices
        size = scores.shape[1] // config.n_group
        group = torch.arange(scores.shape[1]) // size
        if self.does("puts experts into groups in turn"):
            group = torch.arange(scores.shape[1]) % config.n_group
        worth = torch.stack([self.worth(biased[:, group == number]) for number in range(config.n_group)], 1)
        best = torch.topk(worth, config.topk_group).indices
        member = (best[:, None] == group[:, None]).any(2)
        nothing = 0.0 if self.does("fills excluded groups with 0") else -torch.inf
        return torch.topk(biased.masked_fill(~member, nothing), count).indices

    def worth(self, scores: Tensor) -> Tensor:
        """What a group scores."""
        if self.does("scores a group by its best expert"):
            return scores.max(1).values
        if self.does("scores a group by the sum of all its experts"):
            return scores.sum(1)
        return scores.sort(descending=True).values[:, :2].sum(1)
