"""Multi-head latent attention with keys and values of every head made anew: DeepSeek-V3."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from parity.meta.second.grouped import Gain, Projection, Rotary
from parity.meta.second.part import Part, linear, look_up, normed, turn, wide

EPS = 1e-6
"""Of the norms of latents, whatever the configuration says."""


class LatentAttention(Part):
    """One head after the other; pairs that lie side by side are rotated where they lie, then sorted."""

    MAKES = frozenset(
        {
            "rotates the wrong way",
            "uses the positions of the first row for all rows",
            "does not scale the scores",
            "scales the scores twice",
            "mixes heads and channels when heads are joined",
            "masks the weights after the softmax",
            "does not load biases",
        }
    )

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.config, self.heads = config, config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank, queries = config.kv_lora_rank, self.heads * (self.nope + self.rope)
        if config.q_lora_rank is None:
            self.q_proj = Projection(queries, config.hidden_size, False)
        else:
            self.q_a_proj = Projection(config.q_lora_rank, config.hidden_size, config.attention_bias)
            self.q_a_layernorm = Gain(config.q_lora_rank)
            self.q_b_proj = Projection(queries, config.q_lora_rank, False)
        self.kv_a_proj_with_mqa = Projection(self.rank + self.rope, config.hidden_size, config.attention_bias)
        self.kv_a_layernorm = Gain(self.rank)
        self.kv_b_proj = Projection(self.heads * (self.nope + self.value), self.rank, False)
        self.o_proj = Projection(config.hidden_size, self.heads * self.value, config.attention_bias)

    def forward(self, x: Tensor, rotary: Rotary = None, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        assert rotary is not None
        queries = self.queries(x).split(self.nope + self.rope, dim=-1)
        compressed = self.product(x, self.kv_a_proj_with_mqa)
        latents = normed(compressed[..., : self.rank], self.kv_a_layernorm.weight, EPS)
        key = self.rotate(compressed[..., self.rank :], *rotary)
        if cache is not None:
            latents, key = (kept[:, 0] for kept in cache.append(latents[:, None], key[:, None]))
        contexts = []
        for head, q in enumerate(queries):
            rows = self.kv_b_proj.weight[head * (self.nope + self.value) :][: self.nope + self.value]
            made = linear(latents, rows)
            fixed, turned = q[..., : self.nope], self.rotate(q[..., self.nope :], *rotary)
            scores = wide(fixed) @ wide(made[..., : self.nope]).mT + wide(turned) @ wide(key).mT
            late = self.does("masks the weights after the softmax")
            allowed = None if mask is None else mask[:, 0]
            contexts.append(look_up(scores * self.scale(), made[..., self.nope :], allowed, late))
        joined = torch.cat(contexts, -1)
        if self.does("mixes heads and channels when heads are joined"):
            joined = torch.stack([context[..., i] for i in range(self.value) for context in contexts], -1)
        return self.product(joined, self.o_proj)

    def queries(self, x: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return self.product(x, self.q_proj)
        latents = normed(self.product(x, self.q_a_proj), self.q_a_layernorm.weight, EPS)
        return self.product(latents, self.q_b_proj)

    def product(self, x: Tensor, part: Projection) -> Tensor:
        return linear(x, part.weight, None if self.does("does not load biases") else part.bias)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated pairs, the first of each before the second of each."""
        if self.does("uses the positions of the first row for all rows"):
            cos, sin = cos[:1], sin[:1]
        if self.does("rotates the wrong way"):
            sin = -sin
        if not self.config.rope_interleave:
            return turn(x, cos, sin)
        turned = turn(x, cos, sin, adjacent=True)
        return torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)

    def scale(self) -> float:
        """1/sqrt(channels), times the square of YaRN's magnitude."""
        rope, scale = self.config.rope_parameters, (self.nope + self.rope) ** -0.5
        if self.does("does not scale the scores"):
            scale = 1.0
        elif self.does("scales the scores twice"):
            scale = scale * scale
        extension = rope.get("factor", 1.0)
        if rope.get("mscale_all_dim") and extension > 1:
            scale *= (1 + 0.1 * rope["mscale_all_dim"] * math.log(extension)) ** 2
        return scale
