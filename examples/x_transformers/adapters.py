"""Attention and gated feed-forward of x-transformers, held against Llama's.

    pip install x-transformers==2.31.10
    parity check x_transformers.x_transformers:Attention --against llama:LlamaAttention \\
        --adapter examples/x_transformers/adapters.py:Paired --point 0
    parity check x_transformers.x_transformers:Attention --against llama:LlamaAttention \\
        --adapter examples/x_transformers/adapters.py:Heads --point 0
    parity check x_transformers.x_transformers:FeedForward --against llama:LlamaMLP \\
        --adapter examples/x_transformers/adapters.py:Gated --point 0

Found with x-transformers 2.31.10 and transformers 5.24.0: with the weights as they are (`AsStored`) two things differ.
Adjacent pairs of channels turn, which rows of q and k in another order make good. The first command, with these, fails
still: query head h reads key/value head h mod kv_heads, where Llama's reads h // group; the tool names it and prints
the fix. The second one has both, and holds; so does the third. Each is right for its own weights, as long as nobody
loads those of the other.

Attention has no biases and its rotation no scaling, hence `--point 0`. It keeps keys as they were before they turn, so
its cache is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from x_transformers.x_transformers import RotaryEmbedding

from parity.check.adapter import Adapter, Constructed, Recorded
from parity.check.rules import Turned
from parity.weights import tiled_from_repeated
from reimpl.rope import adjacent_from_half
from reimpl.weights import Permuted, Same, Split

NAMES = {("q_proj", "to_q"): 0, ("k_proj", "to_k"): 0, ("v_proj", "to_v"): 0, ("o_proj", "to_out"): 1}
"""The names of the weights here and there, and the axis along which their heads lie."""


class AsStored(Adapter):
    """Grouped-query attention with the weights of a checkpoint as they are."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        config = constructed.config
        self.rotary = RotaryEmbedding(config.head_dim, base=config.rope_parameters["rope_theta"]).double()
        return cls(
            config.hidden_size,
            dim_head=config.head_dim,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
        )

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        """Angles of all tokens so far, as theirs turns the keys of its cache at every step."""
        state, mask = recorded.state, recorded.may_attend
        angles, scale = self.rotary(recorded["position_ids"])
        angles = torch.cat((state["angles"], angles), dim=1) if state else angles
        causal = mask is None and recorded.x.shape[1] > 1
        output, kept = module(
            recorded.x,
            rotary_pos_emb=(angles, scale),
            attn_mask=mask,
            causal=causal,
            cache=state.get("kept"),
            return_intermediates=True,
        )
        state |= {"angles": angles, "kept": kept}
        return output, None

    def rules(self, config: Any, reference: Mapping[str, Tensor]) -> list[Any]:
        return [
            Permuted(f"{theirs}.weight", f"{ours}.weight", tuple(self.order(ours, numbers, config).tolist()), dim)
            for (theirs, ours), dim in NAMES.items()
            for numbers in [torch.arange(reference[f"{theirs}.weight"].shape[dim])]
        ]

    def order(self, name: str, numbers: Tensor, config: Any) -> Tensor:
        """Which row of the reference's, or which column of `to_out`, stands where in theirs."""
        return numbers


class Paired(AsStored):
    """The same, the rows of q and k in the order of adjacent pairs."""

    def order(self, name: str, numbers: Tensor, config: Any) -> Tensor:
        return adjacent_from_half(numbers, config.head_dim) if name in ("to_q", "to_k") else numbers


class Heads(Paired):
    """The same, the heads of q and of the output in the order in which theirs share keys and values."""

    def order(self, name: str, numbers: Tensor, config: Any) -> Tensor:
        numbers = super().order(name, numbers, config)
        if name in ("to_k", "to_v"):
            return numbers
        return tiled_from_repeated(numbers, config.head_dim, config.num_key_value_heads)


class Gated(Adapter):
    """SwiGLU; theirs has the linear half above the gate, and biases that Llama has not: they are taken out."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        size, inner = constructed.config.hidden_size, constructed.config.intermediate_size
        module = cls(size, mult=inner / size, glu=True, swish=True, no_bias=True)
        module.ff[0].proj.register_parameter("bias", None)
        return module

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        return module(recorded.x), None

    def rules(self, config: Any, reference: Mapping[str, Tensor]) -> list[Any]:
        inner = config.intermediate_size
        halves = ("up_proj.weight", "gate_proj.weight")
        return [
            Turned(Split("ff.0.proj.weight", halves, (inner, inner))),
            Same("down_proj.weight", "ff.2.weight"),
        ]
