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

    MAKES = frozenset({"swaps gate and up"})

    def mixed(self, x: Tensor, stack: Stack, weights: Tensor, act: str) -> Tensor:
        """[tokens, size] with weights [tokens, experts]."""
        total = torch.zeros_like(x, dtype=weights.dtype)
        for expert in range(weights.shape[1]):
            rows = stack.gate_up_proj[expert]
            gate, up = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            made = self.expert(x, gate, up, stack.down_proj[expert], act)
            total = total + weights[:, expert, None] * made
        return total.to(x.dtype)

    def expert(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
        if self.does("swaps gate and up"):
            gate, up = up, gate
        return linear(ACTIVATIONS[act](linear(x, gate)) * linear(x, up), down)


class SoftmaxExperts(DenseExperts):
    """Mixtral's: the likeliest by softmax, their weights summing to 1."""

    MAKES = DenseExperts.MAKES

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.config, self.chosen = config, config.num_experts_per_tok
        self.gate = Gain(1)
        self.gate.weight = empty(config.num_local_experts, config.hidden_size)
        self.experts = Stack(config.num_local_experts, config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        powers = wide(linear(tokens, self.gate.weight)).exp()
        chosen = torch.topk(powers, self.chosen).indices
        kept = torch.zeros_like(powers).scatter(1, chosen, powers.gather(1, chosen))
        weights = kept / kept.sum(1, keepdim=True)
        return self.mixed(tokens, self.experts, weights, self.config.hidden_act).reshape(x.shape)


class SigmoidExperts(DenseExperts):
    """DeepSeek-V3's: the best of the best groups by biased sigmoids, weighted without the bias; and shared ones."""

    MAKES = DenseExperts.MAKES
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
        tokens = x.reshape(-1, x.shape[-1])
        scores = 1 / (1 + (-linear(wide(tokens), self.gate.weight.to(wide(tokens).dtype))).exp())
        chosen = torch.topk(self.electable(scores.detach()), self.config.num_experts_per_tok).indices
        kept = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        if self.config.norm_topk_prob:
            kept = kept / (kept.sum(1, keepdim=True) + 1e-20)
        routed = self.mixed(tokens, self.experts, kept * self.config.routed_scaling_factor, self.config.hidden_act)
        shared = self.shared_experts
        weights = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        return (routed + self.expert(tokens, *weights, self.config.hidden_act)).reshape(x.shape)

    def electable(self, scores: Tensor) -> Tensor:
        """Biased scores; those outside of the best groups can win nothing."""
        biased, groups, kept = scores + self.gate.e_score_correction_bias, self.config.n_group, self.config.topk_group
        if kept == groups:
            return biased
        size = biased.shape[1] // groups
        each = [biased[:, start : start + size] for start in range(0, biased.shape[1], size)]
        worth = torch.stack([group.sort(descending=True).values[:, :2].sum(1) for group in each], 1)
        best = torch.topk(worth, kept).indices
        member = torch.stack([(best == number).any(1) for number in range(groups)], 1)
        return biased.masked_fill(~member.repeat_interleave(size, 1), -torch.inf)
