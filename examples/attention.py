"""A Llama attention as one writes it in an afternoon. It has a mistake: see what `parity check` says.

parity check examples/attention.py:MyLlamaAttention --against llama:LlamaAttention
"""

import torch
from torch import nn
from torch.nn import functional as F


class MyLlamaAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        q, k, v = (self.heads(project(hidden_states)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = k.repeat(1, self.group, 1, 1), v.repeat(1, self.group, 1, 1)
        context = F.scaled_dot_product_attention(q, k, v, attention_mask)
        return self.o_proj(context.transpose(1, 2).flatten(2)), None

    def heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
