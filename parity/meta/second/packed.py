"""GPT-2's attention, whose matrices are stored [in, out], head by head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parity.meta.second.part import JOINTS, SCALES, Part, empty, joined, look_up, scaled, wide


class Columns(nn.Module):
    """A matrix stored [in, out], and a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = empty(inputs, outputs), empty(outputs)


class PackedAttention(Part):
    """Queries, keys and values are cut out of one projection by their columns, head by head."""

    MAKES = (
        SCALES
        | JOINTS
        | {
            "mixes heads and channels when heads are split",
            "masks the weights after the softmax",
            "puts new keys before those in the cache",
            "stores keys as values and values as keys",
            "does not load biases",
            "ignores scale_attn_weights",
            "ignores scale_attn_by_inverse_layer_idx",
            "divides scores by the layer's index for its number",
        }
    )

    def __init__(self, config: Any, wrong: Iterable[str] = (), layer_idx: int = 1) -> None:
        super().__init__(wrong)
        self.config, self.layer, self.heads = config, layer_idx, config.n_head
        self.size, self.width = config.n_embd, config.n_embd // config.n_head
        self.c_attn, self.c_proj = Columns(self.size, 3 * self.size), Columns(self.size, self.size)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        keys = torch.stack([self.cut(x, 1, head) for head in range(self.heads)], 1)
        values = torch.stack([self.cut(x, 2, head) for head in range(self.heads)], 1)
        if cache is not None:
            keys, values = self.remember(cache, keys, values)
        contexts = []
        for head in range(self.heads):
            scores = wide(self.cut(x, 0, head)) @ wide(keys[:, head]).mT * self.scale()
            late = self.does("masks the weights after the softmax")
            contexts.append(look_up(scores, values[:, head], None if mask is None else mask[:, 0], late))
        return joined(contexts, self.does) @ self.c_proj.weight + self.bias(self.c_proj)

    def cut(self, x: Tensor, block: int, head: int) -> Tensor:
        """The queries (block 0), keys or values of a head."""
        start = self.size * block + self.width * head
        columns = slice(start, start + self.width)
        if self.does("mixes heads and channels when heads are split"):
            columns = slice(self.size * block + head, self.size * (block + 1), self.heads)
        return x @ self.c_attn.weight[:, columns] + self.bias(self.c_attn)[columns]

    def bias(self, part: Columns) -> Tensor:
        return torch.zeros_like(part.bias) if self.does("does not load biases") else part.bias

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

    def scale(self) -> float:
        scale, layer = 1.0, self.layer
        if self.config.scale_attn_weights or self.does("ignores scale_attn_weights"):
            scale /= self.width**0.5
        if self.does("divides scores by the layer's index for its number"):
            layer = max(0, layer - 1)
        if self.config.scale_attn_by_inverse_layer_idx and not self.does("ignores scale_attn_by_inverse_layer_idx"):
            scale /= layer + 1
        return scaled(scale, self.does)
