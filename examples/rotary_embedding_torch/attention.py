"""Attention as one writes it with rotary-embedding-torch, held against Llama's.

    pip install rotary-embedding-torch==0.9.1
    parity check examples/rotary_embedding_torch/attention.py:Attention --against llama:LlamaAttention \\
        --adapter examples/rotary_embedding_torch/attention.py:call --point 0
    parity check examples/rotary_embedding_torch/attention.py:Attention --against llama:LlamaAttention \\
        --adapter examples/rotary_embedding_torch/attention.py:call --point 0 \\
        --weights examples/rotary_embedding_torch/adjacent.toml

The package turns adjacent pairs of channels, Llama's checkpoints are made for pairs of halves. Both are right, each for
its own weights: the first command fails and says so, the second one permutes the rows of q and k.
"""

from __future__ import annotations

from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, config.hidden_size, bias=False)
        # In a list, so that its frequencies, which the package keeps as a parameter, are none of this module's weights.
        self.rotary = [RotaryEmbedding(dim, theta=config.rope_parameters["rope_theta"]).double()]

    def forward(self, x: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None = None) -> Any:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        seen = 0 if past is None else past[0].shape[2]
        q = self.rotary[0].rotate_queries_or_keys(q, offset=seen)
        k = self.rotary[0].rotate_queries_or_keys(k, offset=seen)
        if past is not None:
            k, v = (torch.cat(both, dim=2) for both in zip(past, (k, v), strict=True))
        context = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and not seen, enable_gqa=True)
        return self.o_proj(context.transpose(1, 2).flatten(2)), (k, v)


def call(module: nn.Module, recorded: Any) -> Any:
    """The way from what Llama's attention is called with to what this one is; its cache keeps pairs of its own."""
    output, recorded.state["past"] = module(recorded.x, recorded.may_attend, recorded.state.get("past"))
    return output, None
