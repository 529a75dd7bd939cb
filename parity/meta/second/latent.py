"""Multi-head latent attention with keys and values of every head made anew: DeepSeek-V3."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from parity.meta.second.grouped import Gain, Projection, Rotary
from parity.meta.second.part import ROTATIONS, SCALES, Part, linear, look_up, normed, rotated, scaled, wide

EPS = 1e-6
"""Of the norms of latents, whatever the configuration says."""


class LatentAttention(Part):
    """One head after the other; pairs that lie side by side are rotated where they lie, then sorted."""

    MAKES = (
        ROTATIONS
        | SCALES
        | {
            "masks the weights after the softmax",
            "does not sharpen the scores where the context was extended",
            "sharpens the scores for queries, and not for keys",
            "sharpens the scores by mscale for mscale_all_dim",
            "scales by the channels without position alone",
            "scales by the channels of a value",
            "takes values before keys out of kv_b",
            "takes the keys of all heads, then the values of all heads, out of kv_b",
            "takes the channels that turn before those without position out of q",
            "takes the rotated key before the latent out of kv_a",
            "does not norm the latent of keys and values",
            "does not norm the latent of queries",
            "norms the rotated key too",
            "caches latents before their norm",
            "leaves the rotated channels out of the scores",
            "ignores rope_interleave, and takes it for set",
            "takes rotated channels for halves that are stored as adjacent pairs",
            "brings the adjacent pairs of q together, and leaves those of k",
            "caches the rotated key in adjacent pairs",
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
        latents, key = self.compressed(x)
        key = rotated(self.halves(key, "k"), *rotary, "k", self.does)
        if not self.does("caches latents before their norm"):
            latents = self.latent_norm(latents)
        if cache is not None:
            latents, key = self.remember(cache, latents, key)
        if self.does("caches latents before their norm"):
            latents = self.latent_norm(latents)
        contexts, late = [], self.does("masks the weights after the softmax")
        for head, (fixed, turning) in enumerate(self.queries(x)):
            rows_k, rows_v = self.rows(head)
            turned = rotated(self.halves(turning, "q"), *rotary, "q", self.does)
            scores = wide(fixed) @ wide(linear(latents, rows_k)).mT
            if not self.does("leaves the rotated channels out of the scores"):
                scores = scores + wide(turned) @ wide(key).mT
            allowed = None if mask is None else mask[:, 0]
            contexts.append(look_up(scores * self.scale(), linear(latents, rows_v), allowed, late))
        return self.product(torch.cat(contexts, -1), self.o_proj)

    def compressed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent and key as they are projected."""
        rows = self.product(x, self.kv_a_proj_with_mqa)
        if self.does("takes the rotated key before the latent out of kv_a"):
            key, latents = rows[..., : self.rope], rows[..., self.rope :]
        else:
            latents, key = rows[..., : self.rank], rows[..., self.rank :]
        if self.does("norms the rotated key too"):
            key = key * ((key * key).sum(-1, keepdim=True) / self.rope) ** -0.5
        return latents, key

    def latent_norm(self, latents: Tensor) -> Tensor:
        skips = self.does("does not norm the latent of keys and values")
        return latents if skips else normed(latents, self.kv_a_layernorm.weight, EPS)

    def remember(self, cache: Any, latents: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and keys of all tokens; a cache holds them as if of one head."""
        if not self.does("caches the rotated key in adjacent pairs"):
            return tuple(kept[:, 0] for kept in cache.append(latents[:, None], key[:, None]))
        pairs = torch.stack(key.chunk(2, -1), -1).flatten(-2)
        latents, pairs = (kept[:, 0] for kept in cache.append(latents[:, None], pairs[:, None]))
        return latents, torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1)

    def queries(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each head the channels without position and those that turn."""
        if self.config.q_lora_rank is None:
            rows = self.product(x, self.q_proj)
        else:
            latents = self.product(x, self.q_a_proj)
            if not self.does("does not norm the latent of queries"):
                latents = normed(latents, self.q_a_layernorm.weight, EPS)
            rows = self.product(latents, self.q_b_proj)
        heads = rows.split(self.nope + self.rope, dim=-1)
        if self.does("takes the channels that turn before those without position out of q"):
            return [(head[..., self.rope :], head[..., : self.rope]) for head in heads]
        return [(head[..., : self.nope], head[..., self.nope :]) for head in heads]

    def rows(self, head: int) -> tuple[Tensor, Tensor]:
        """The rows of kv_b that make the keys of a head, and those that make its values."""
        weight, both = self.kv_b_proj.weight, self.nope + self.value
        if self.does("takes the keys of all heads, then the values of all heads, out of kv_b"):
            values = weight[self.heads * self.nope :]
            return weight[head * self.nope :][: self.nope], values[head * self.value :][: self.value]
        own = weight[head * both :][:both]
        if self.does("takes values before keys out of kv_b"):
            return own[self.value :], own[: self.value]
        return own[: self.nope], own[self.nope :]

    def product(self, x: Tensor, part: Projection) -> Tensor:
        return linear(x, part.weight, part.bias)

    def halves(self, x: Tensor, name: str) -> Tensor:
        """The first of each pair before the second of each."""
        stored = self.config.rope_interleave or self.does("ignores rope_interleave, and takes it for set")
        leaves = name == "k" and self.does("brings the adjacent pairs of q together, and leaves those of k")
        if leaves or not stored or self.does("takes rotated channels for halves that are stored as adjacent pairs"):
            return x
        return torch.cat((x[..., 0::2], x[..., 1::2]), -1)

    def scale(self) -> float:
        """1/sqrt(channels), times the square of YaRN's magnitude."""
        rope, channels, power = self.config.rope_parameters, self.nope + self.rope, 2
        if self.does("scales by the channels without position alone"):
            channels = self.nope
        if self.does("scales by the channels of a value"):
            channels = self.value
        weight, extension = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
        if self.does("sharpens the scores by mscale for mscale_all_dim"):
            weight = rope.get("mscale")
        if self.does("sharpens the scores for queries, and not for keys"):
            power = 1
        if self.does("does not sharpen the scores where the context was extended"):
            power = 0
        magnitude = 1 + 0.1 * weight * math.log(extension) if weight and extension > 1 else 1.0
        return scaled(channels**-0.5 * magnitude**power, self.does)
