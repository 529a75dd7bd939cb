"""Grouped-query attention head by head: Llama, Mistral, Mixtral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parity.meta.second.part import (
    JOINTS,
    ROTATIONS,
    SCALES,
    Part,
    empty,
    joined,
    linear,
    look_up,
    normed,
    rotated,
    scaled,
    wide,
)

Rotary = tuple[Tensor, Tensor] | None
BIASED = {"LlamaConfig": "qkvo", "Qwen2Config": "qkv", "Qwen3Config": "qkvo"}
"""Which projections may have a bias, by the configuration."""


class Projection(nn.Module):
    """Weight and bias under the names of a checkpoint."""

    def __init__(self, outputs: int, inputs: int, bias: bool) -> None:
        super().__init__()
        self.weight, self.bias = empty(outputs, inputs), empty(outputs) if bias else None


class Gain(nn.Module):
    """A gain under its name in a checkpoint."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty(size)


class GroupedAttention(Part):
    """One head after the other, each with its own rotation and its own softmax."""

    MAKES = (
        ROTATIONS
        | SCALES
        | JOINTS
        | {
            "rotates v too",
            "permutes q and k for adjacent pairs, and rotates halves",
            "permutes the rows of k with the number of query heads",
            "scales by hidden_size / heads for head_dim",
            "tiles key/value heads where the reference repeats each",
            "takes the number of key/value heads for the size of a group",
            "lets all heads read the first key/value head",
            "mixes heads and channels when heads are split",
            "masks the weights after the softmax",
            "puts new keys before those in the cache",
            "stores keys as values and values as keys",
            "swaps k and v",
            "does not load biases",
            "reads o_proj untransposed where it is square",
            "detaches k",
            "norms queries and keys after the rotation",
            "swaps the gains of queries and keys",
            "does not norm keys",
            "does not norm queries",
            "norms neither queries nor keys",
            "norms queries and keys over all heads together",
            "norms values too",
        }
    )

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.hidden, self.eps = config.hidden_size, config.rms_norm_eps
        biased = BIASED.get(type(config).__name__, "")
        if not getattr(config, "attention_bias", biased == "qkv"):
            biased = ""
        channels = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        for name, heads in channels.items():
            setattr(self, f"{name}_proj", Projection(heads * self.width, self.hidden, name in biased))
        self.o_proj = Projection(self.hidden, self.heads * self.width, "o" in biased)
        self.norms_heads = type(config).__name__ == "Qwen3Config"
        if self.norms_heads:
            self.q_norm, self.k_norm = Gain(self.width), Gain(self.width)

    def forward(self, x: Tensor, rotary: Rotary = None, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        q, k, v = (self.project(x, name) for name in "qkv")
        late = self.does("norms queries and keys after the rotation")
        if self.norms_heads and not late:
            q, k, v = self.normed(q, "q"), self.normed(k, "k"), self.normed(v, "v")
        if rotary is not None:
            q, k = ([rotated(each, *rotary, name, self.does) for each in of] for of, name in ((q, "q"), (k, "k")))
            if self.does("rotates v too"):
                v = [rotated(each, *rotary, "v", self.does) for each in v]
        if self.norms_heads and late:
            q, k = self.normed(q, "q"), self.normed(k, "k")
        if self.does("detaches k"):
            k = [each.detach() for each in k]
        keys, values = torch.stack(k, 1), torch.stack(v, 1)
        if cache is not None:
            keys, values = self.remember(cache, keys, values)
        contexts = [self.context(h, q[h], keys, values, mask) for h in range(self.heads)]
        return self.output(contexts)

    def project(self, x: Tensor, name: str) -> list[Tensor]:
        """Queries, keys or values of each head."""
        if self.does("swaps k and v"):
            name = {"q": "q", "k": "v", "v": "k"}[name]
        part = getattr(self, f"{name}_proj")
        weight, bias = part.weight, None if self.does("does not load biases") else part.bias
        if name == "k" and self.does("permutes the rows of k with the number of query heads"):
            order = self.misread_rows()
            weight, bias = weight[order], None if bias is None else bias[order]
        if name in "qk" and self.does("permutes q and k for adjacent pairs, and rotates halves"):
            half = self.width // 2
            order = [h + i + j * half for h in range(0, len(weight), self.width) for i in range(half) for j in (0, 1)]
            weight, bias = weight[order], None if bias is None else bias[order]
        rows = linear(x, weight, bias)
        if self.does("mixes heads and channels when heads are split"):
            heads = rows.shape[-1] // self.width
            return [rows[..., head::heads] for head in range(heads)]
        return list(rows.split(self.width, dim=-1))

    def normed(self, heads: list[Tensor], name: str) -> list[Tensor]:
        """Queries, keys or, by mistake, values of each head, normed."""
        skipped = {"q": "does not norm queries", "k": "does not norm keys"}
        if name == "v":
            return [normed(v, self.k_norm.weight, self.eps) for v in heads] if self.does("norms values too") else heads
        if self.does(skipped[name]) or self.does("norms neither queries nor keys"):
            return heads
        gains = {"q": self.q_norm.weight, "k": self.k_norm.weight}
        gain = gains[{"q": "k", "k": "q"}[name] if self.does("swaps the gains of queries and keys") else name]
        if self.does("norms queries and keys over all heads together"):
            squares = sum((wide(each) ** 2).sum(-1, keepdim=True) for each in heads)
            power = (squares / (len(heads) * self.width) + self.eps) ** -0.5
            return [(wide(each) * power * wide(gain)).to(each.dtype) for each in heads]
        return [normed(each, gain, self.eps) for each in heads]

    def misread_rows(self) -> list[int]:
        """Rows of k, taken apart with the wrong width of a head and put together with the right one."""
        wrong = self.width * self.kv_heads // self.heads
        rows = list(range(self.kv_heads * self.width))
        if wrong % 2:
            return rows
        adjacent = [
            rows[start + half * (wrong // 2) + i]
            for start in range(0, len(rows), wrong)
            for i in range(wrong // 2)
            for half in (0, 1)
        ]
        return [
            adjacent[start + 2 * i + half]
            for start in range(0, len(rows), self.width)
            for half in (0, 1)
            for i in range(self.width // 2)
        ]

    def remember(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens."""
        new = keys.shape[2]
        if self.does("stores keys as values and values as keys"):
            values, keys = cache.append(values, keys)
        else:
            keys, values = cache.append(keys, values)
        if self.does("puts new keys before those in the cache"):
            order = [*range(keys.shape[2] - new, keys.shape[2]), *range(keys.shape[2] - new)]
            keys, values = keys[:, :, order], values[:, :, order]
        return keys, values

    def context(self, head: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The context of one query head."""
        read = self.read(head)
        scores = wide(q) @ wide(keys[:, read]).mT * self.scale()
        late = self.does("masks the weights after the softmax")
        return look_up(scores, values[:, read], None if mask is None else mask[:, 0], late)

    def read(self, head: int) -> int:
        """The key/value head that a query head reads."""
        if self.does("tiles key/value heads where the reference repeats each"):
            return head % self.kv_heads
        if self.does("takes the number of key/value heads for the size of a group"):
            return min(head // self.kv_heads, self.kv_heads - 1)
        if self.does("lets all heads read the first key/value head"):
            return 0
        return head * self.kv_heads // self.heads

    def scale(self) -> float:
        if self.does("scales by hidden_size / heads for head_dim"):
            return (self.heads / self.hidden) ** 0.5
        return scaled(1 / self.width**0.5, self.does)

    def output(self, contexts: list[Tensor]) -> Tensor:
        """The contexts of all heads, joined and projected."""
        channels = joined(contexts, self.does)
        turned = self.does("reads o_proj untransposed where it is square") and self.hidden == channels.shape[-1]
        weight = self.o_proj.weight.T if turned else self.o_proj.weight
        return linear(channels, weight, None if self.does("does not load biases") else self.o_proj.bias)
