"""A Llama attention as a stranger writes it, and others that are wrong, or that misbehave, each in one way."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Right(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.dim = layer_idx, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=bias)

    def rotated(self, q, k, tables):
        cos, sin = (table[:, None] for table in tables)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def weights(self, scores):
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    def repeated(self, x):
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:2], -1, self.dim)
        projected = (each(hidden_states) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.view(shape).transpose(1, 2) for each in projected)
        q, k = self.rotated(q, k, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        scores = q @ self.repeated(k).mT * self.dim**-0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        context = self.weights(scores) @ self.repeated(v)
        return self.o_proj(context.transpose(1, 2).flatten(2)), None


class Tiled(Right):
    """Key/value heads in the wrong order."""

    def repeated(self, x):
        return x.repeat(1, self.heads // self.kv_heads, 1, 1)


class Adjacent(Right):
    """Rotates adjacent pairs of channels."""

    def rotated(self, q, k, tables):
        cos, sin = (table[:, None, :, : table.shape[-1] // 2] for table in tables)
        pairs = [(x[..., ::2], x[..., 1::2]) for x in (q, k)]
        return tuple(torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2) for a, b in pairs)


class Coarse(Right):
    """A softmax in the dtype of its input."""

    def weights(self, scores):
        return scores.softmax(-1)


class Writes(Right):
    """Leaves something behind in its input."""

    def forward(self, hidden_states, *args, **kwargs):
        output = super().forward(hidden_states, *args, **kwargs)
        hidden_states.data.mul_(2)
        return output


class NotANumber(Right):
    def weights(self, scores):
        return scores * torch.nan


class Calls(nn.Module):
    """The reference in disguise."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.inner = LlamaAttention(config, layer_idx)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Borrows(Right):
    """Right, with one function of the reference's."""

    def rotated(self, q, k, tables):
        return apply_rotary_pos_emb(q, k, *tables)


class Returns(Right):
    """Its input."""

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states, None


class Nonsense(Right):
    def forward(self, *args, **kwargs):
        return "nonsense"


class Raises(Right):
    def forward(self, *args, **kwargs):
        raise ArithmeticError("no such rope")


class Hangs(Right):
    def forward(self, *args, **kwargs):
        while True:
            pass


class Greedy(Right):
    """Wants more memory than there is."""

    def forward(self, *args, **kwargs):
        return torch.zeros(2**42)


class Wavers(Right):
    def weights(self, scores):
        return scores.softmax(-1) + 0.1 * torch.rand_like(scores)


class Sparse(Right):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0].to_sparse(), None


class Interrupts(Right):
    def forward(self, *args, **kwargs):
        raise KeyboardInterrupt


class Uncopied(Right):
    """Right, and holds what cannot be copied."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.lock = threading.Lock()


class Copies(Right):
    """Right, and leaves copies of the process behind."""

    def forward(self, *args, **kwargs):
        if os.fork() == 0:
            Path(os.environ["PARITY_TEST_COPIES"]).write_text(f"{os.getpid()}")
            time.sleep(100)
            os._exit(0)
        return super().forward(*args, **kwargs)


class Lazy(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.q_proj = nn.LazyLinear(config.hidden_size)


class Leaves(Right):
    """Ends the process."""

    def forward(self, *args, **kwargs):
        os._exit(0)


class Exits(Right):
    def forward(self, *args, **kwargs):
        sys.exit(0)


class OnMeta(Right):
    def __init__(self, config, layer_idx):
        with torch.device("meta"):
            super().__init__(config, layer_idx)


class Unbuildable(Right):
    def __init__(self, config, layer_idx):
        raise ArithmeticError("no such size")


class OwnSignature(nn.Module):
    """Fused projections under other names, its own cache, and a signature of its own."""

    def __init__(self, width, heads, kv_heads, dim, bias):
        super().__init__()
        self.sizes, self.dim = (heads * dim, kv_heads * dim, kv_heads * dim), dim
        self.wqkv = nn.Linear(width, sum(self.sizes), bias=bias)
        self.out = nn.Linear(heads * dim, width, bias=bias)

    def forward(self, x, cos, sin, mask, past):
        q, k, v = (
            each.unflatten(-1, (-1, self.dim)).transpose(1, 2) for each in self.wqkv(x).split(self.sizes, dim=-1)
        )
        q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
        if past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
        context = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.out(context.transpose(1, 2).flatten(2)), (k, v)


class Experts(nn.Module):
    """A mixture of experts as Mixtral's, one module for each expert."""

    largest = True

    def __init__(self, config):
        super().__init__()
        width, inner, self.chosen = config.hidden_size, config.intermediate_size, config.num_experts_per_tok
        self.act = {"silu": nn.SiLU()}[config.hidden_act]
        self.router = nn.Linear(width, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(config.num_local_experts))

    def forward(self, hidden_states):
        x = hidden_states.flatten(0, 1)
        scores = self.router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.chosen, largest=self.largest)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out.view_as(hidden_states)


class Expert(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class WorstExperts(Experts):
    """Sends tokens to those experts that want them least."""

    largest = False


class Gated(Right):
    """Right, with a gate that is open and that the reference does not have."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        output, rest = super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)
        return output * self.gate, rest


def open_gate(config):
    return torch.ones(config.hidden_size)


def as_state_dict(config, reference):
    """The weights of `OwnSignature`, by hand."""
    packed = [reference[f"{name}_proj.weight"] for name in "qkv"]
    return {"wqkv.weight": torch.cat(packed), "out.weight": reference["o_proj.weight"]}
