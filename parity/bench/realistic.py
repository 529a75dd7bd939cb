"""Pairs as large as the layers that people run, as far as a benchmark can afford it.

Sizes are chosen by the names of a configuration's fields, so that a new family has them without being listed here. All
else in a configuration is what the family's file makes of the first choice of every axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.family import Family, Layer
from parity.pair import Pair, on_disk
from parity.reference import Reference
from parity.tiny import draw, initialise

Sizes = Mapping[str, Any]

MULTI_HEAD: Sizes = {
    **dict.fromkeys(("hidden_size", "n_embd", "attention_hidden_size"), 768),
    **dict.fromkeys(("num_attention_heads", "n_head"), 12),
    **dict.fromkeys(("intermediate_size", "n_inner"), 3072),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 8192),
    "vocab_size": 32000,
}
"""As in GPT-2 and BERT base."""

TORCH: Sizes = {"d_model": 768, "nhead": 12, "dim_feedforward": 3072}
"""The same by the names of torch."""

GROUPED: Sizes = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
}
"""Llama-3.2-1B, half as wide: its heads and its groups of four, but half as many."""

EXPERTS: Sizes = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 512),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 64),
    **dict.fromkeys(("num_experts_per_tok",), 8),
    **dict.fromkeys(("n_group",), 8),
    **dict.fromkeys(("topk_group",), 4),
}
"""Many small ones."""

LATENT: Sizes = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""DeepSeek-V3's heads, but an eighth of them."""

FULL: Sizes = {"hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128}
"""All of them."""

RULES: tuple[tuple[str, Sizes], ...] = (
    ("vocab_size", MULTI_HEAD),
    ("nhead", TORCH),
    ("num_key_value_heads", GROUPED),
    ("num_experts_per_tok", EXPERTS),
    ("kv_lora_rank", LATENT),
)
"""A configuration that has this field has these sizes; later ones win."""


def pair(family: Family, layer: Layer, more: Sizes) -> Pair:
    """The pair of a layer at realistic sizes, changed by `more`."""

    def configure(point: Any) -> dict[str, Any]:
        fields = family.configure(point)
        for field, sizes in (*RULES, ("vocab_size", more)):
            if field in fields:
                fields |= {name: size for name, size in sizes.items() if name in fields}
        return fields

    positions = family.positions and MULTI_HEAD["n_positions"]
    return Pair(replace(family, configure=configure, positions=positions), layer, {})


def weights(side: Reference, seed: int) -> dict[str, Tensor]:
    """Random weights by their names on disk, of the distributions that tiny checkpoints have, too."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, slot in on_disk(side, side.slots).items():
        full_name, shape = side.layer.at + name, tuple(slot.shape)
        each = initialise.distribution(full_name, shape, side.family.model_type)
        numbers = torch.randn(shape, generator=generator) * torch.as_tensor(each.scale).float() + each.mean
        drawn[full_name] = draw.bfloat16(numbers.clamp(each.low, each.high))
    return drawn
