"""Grouped-query attention head by head: Llama, Mistral, Mixtral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parity.meta.second.part import Part, empty, linear, look_up, normed, turn, wide

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

    MAKES = frozenset(
        {
            "rotates adjacent pairs where the reference rotates halves",
            "rotates the wrong way",
            "rotates k the wrong way, and q the right way",
            "leaves k unrotated",
            "rotates v too",
            "permutes the rows of k with the number of query heads",
            "uses the positions of the first row for all rows",
            "does not scale the scores",
            "scales the scores twice",
            "scales by hidden_size / heads for head_dim",
            "tiles key/value heads where the reference repeats each",
            "mixes heads and channels when heads are joined",
            "masks the weights after the softmax",
            "puts new keys before those in the cache",
            "stores keys as values and values as keys",
            "swaps k and v",
            "does not load biases",
            "reads o_proj untransposed where it is square",
            "detaches k",
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
        if self.norms_heads:
            q = [normed(each, self.q_norm.weight, self.eps) for each in q]
            k = [normed(each, self.k_norm.weight, self.eps) for each in k]
        if rotary is not None:
            q, k, v = self.rotate(q, k, v, *rotary)
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
        return list(linear(x, weight, bias).split(self.width, dim=-1))

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

    def rotate(
        self, q: list[Tensor], k: list[Tensor], v: list[Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        if self.does("uses the positions of the first row for all rows"):
            cos, sin = cos[:1], sin[:1]
        adjacent = self.does("rotates adjacent pairs where the reference rotates halves")
        if self.does("rotates the wrong way"):
            sin = -sin
        back = -sin if self.does("rotates k the wrong way, and q the right way") else sin
        if not self.does("leaves k unrotated"):
            k = [turn(each, cos, back, adjacent) for each in k]
        if self.does("rotates v too"):
            v = [turn(each, cos, sin, adjacent) for each in v]
        return [turn(each, cos, sin, adjacent) for each in q], k, v

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
        tiles = self.does("tiles key/value heads where the reference repeats each")
        read = head % self.kv_heads if tiles else head * self.kv_heads // self.heads
        scores = wide(q) @ wide(keys[:, read]).mT * self.scale()
        late = self.does("masks the weights after the softmax")
        return look_up(scores, values[:, read], None if mask is None else mask[:, 0], late)

    def scale(self) -> float:
        if self.does("does not scale the scores"):
            return 1.0
        if self.does("scales by hidden_size / heads for head_dim"):
            return (self.heads / self.hidden) ** 0.5
        return 1 / self.width if self.does("scales the scores twice") else 1 / self.width**0.5

    def output(self, contexts: list[Tensor]) -> Tensor:
        if self.does("mixes heads and channels when heads are joined"):
            joined = torch.stack([context[..., i] for i in range(self.width) for context in contexts], -1)
        else:
            joined = torch.cat(contexts, -1)
        turned = self.does("reads o_proj untransposed where it is square") and self.hidden == joined.shape[-1]
        weight = self.o_proj.weight.T if turned else self.o_proj.weight
        return linear(joined, weight, None if self.does("does not load biases") else self.o_proj.bias)
