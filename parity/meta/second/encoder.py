"""BERT's attention with its residual and its norm, head by head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parity.meta.second.grouped import Projection
from parity.meta.second.part import Part, empty, linear, look_up, wide


class Norm(nn.Module):
    """Gain and bias of a LayerNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = empty(size), empty(size)


class EncoderAttention(Part):
    """norm(x + Linear(attention(x)))."""

    MAKES = frozenset(
        {
            "does not scale the scores",
            "scales the scores twice",
            "mixes heads and channels when heads are joined",
            "masks the weights after the softmax",
            "swaps k and v",
            "does not load biases",
        }
    )

    self: Any
    output: Any

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.heads, self.width = config.num_attention_heads, config.head_dim
        self.eps, size = config.layer_norm_eps, config.hidden_size
        self.self, self.output = nn.Module(), nn.Module()
        for name in ("query", "key", "value"):
            setattr(self.self, name, Projection(size, size, bias=True))
        self.output.dense, self.output.LayerNorm = Projection(size, size, bias=True), Norm(size)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        names = ("query", "value", "key") if self.does("swaps k and v") else ("query", "key", "value")
        q, k, v = (self.product(x, getattr(self.self, name)).split(self.width, dim=-1) for name in names)
        contexts = []
        for head in range(self.heads):
            scores = wide(q[head]) @ wide(k[head]).mT * self.scale()
            late = self.does("masks the weights after the softmax")
            contexts.append(look_up(scores, v[head], None if mask is None else mask[:, 0], late))
        joined = torch.cat(contexts, -1)
        if self.does("mixes heads and channels when heads are joined"):
            joined = torch.stack([context[..., i] for i in range(self.width) for context in contexts], -1)
        return self.norm(x + self.product(joined, self.output.dense))

    def product(self, x: Tensor, part: Projection) -> Tensor:
        return linear(x, part.weight, None if self.does("does not load biases") else part.bias)

    def scale(self) -> float:
        if self.does("does not scale the scores"):
            return 1.0
        return 1 / self.width if self.does("scales the scores twice") else 1 / self.width**0.5

    def norm(self, x: Tensor) -> Tensor:
        """The deviation from the mean, over its root mean square."""
        gain = self.output.LayerNorm
        deviation = wide(x) - wide(x).sum(-1, keepdim=True) / x.shape[-1]
        power = ((deviation * deviation).sum(-1, keepdim=True) / x.shape[-1] + self.eps) ** -0.5
        bias = torch.zeros_like(gain.bias) if self.does("does not load biases") else gain.bias
        return (deviation * power * wide(gain.weight) + wide(bias)).to(x.dtype)
