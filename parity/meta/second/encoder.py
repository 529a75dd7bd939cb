"""BERT's attention with its residual and its norm, head by head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parity.meta.second.grouped import Projection
from parity.meta.second.part import JOINTS, SCALES, Part, empty, joined, linear, look_up, scaled, wide


class Norm(nn.Module):
    """Gain and bias of a LayerNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = empty(size), empty(size)


class EncoderAttention(Part):
    """norm(x + Linear(attention(x)))."""

    MAKES = (
        SCALES
        | JOINTS
        | {
            "mixes heads and channels when heads are split",
            "masks the weights after the softmax",
            "swaps k and v",
            "does not load biases",
            "norms before the sum where the reference norms after",
            "leaves out the residual",
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
        q, k, v = (self.heads_of(self.product(x, getattr(self.self, name))) for name in names)
        contexts = []
        for head in range(self.heads):
            scores = wide(q[head]) @ wide(k[head]).mT * self.scale()
            late = self.does("masks the weights after the softmax")
            contexts.append(look_up(scores, v[head], None if mask is None else mask[:, 0], late))
        made = self.product(joined(contexts, self.does), self.output.dense)
        if self.does("norms before the sum where the reference norms after"):
            return x + self.norm(made)
        return self.norm(made if self.does("leaves out the residual") else x + made)

    def heads_of(self, rows: Tensor) -> list[Tensor]:
        if self.does("mixes heads and channels when heads are split"):
            return [rows[..., head :: self.heads] for head in range(self.heads)]
        return list(rows.split(self.width, dim=-1))

    def product(self, x: Tensor, part: Projection) -> Tensor:
        return linear(x, part.weight, None if self.does("does not load biases") else part.bias)

    def scale(self) -> float:
        return scaled(1 / self.width**0.5, self.does)

    def norm(self, x: Tensor) -> Tensor:
        """The deviation from the mean, over its root mean square."""
        gain = self.output.LayerNorm
        deviation = wide(x) - wide(x).sum(-1, keepdim=True) / x.shape[-1]
        power = ((deviation * deviation).sum(-1, keepdim=True) / x.shape[-1] + self.eps) ** -0.5
        bias = torch.zeros_like(gain.bias) if self.does("does not load biases") else gain.bias
        return (deviation * power * wide(gain.weight) + wide(bias)).to(x.dtype)
