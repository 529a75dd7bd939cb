"""Figures that texts on Transformers often give, and what comes out when models are counted.

The right-hand sides are computed from configurations; `parity/test_sizes.py` holds each of them, and shows that the
figure beside it is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from parity.published import MODELS
from parity.sizes import LENGTH, of


@dataclass(frozen=True)
class Correction:
    """A figure as it is often read, what it is instead, and the command that prints that."""

    read: str
    found: str
    command: str


def layers(model: str) -> int:
    """How many layers a published model has."""
    fields = MODELS[model]
    return int(fields.get("num_hidden_layers", fields.get("n_layer", 0)))


def kept(model: str) -> tuple[int, int]:
    """The numbers that its cache keeps per token and layer, and those of keys and values for each query head."""
    return of(MODELS[model]).cached // layers(model), of(MODELS[model]).expanded // layers(model)


def feed_forward(model: str, hidden: int, inner: int) -> float:
    """The FLOPs of a feed-forward layer in units of T d d_ff."""
    return of(MODELS[model]).part("feed-forward").flops(LENGTH) / layers(model) / (LENGTH * hidden * inner)


LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
    }
)
"""Latents of 512 channels for 32 heads of 128, as MLA is often introduced."""


def corrections() -> list[Correction]:
    """All of them."""
    llama, small = of(MODELS["llama-2-7b"]), of(LATENT)
    shared = MODELS["llama-2-7b"]["vocab_size"] * MODELS["llama-2-7b"]["hidden_size"]
    mixtral, deepseek = of(MODELS["mixtral-8x7b"]), of(MODELS["deepseek-v3"])
    (full, _), (grouped, whole), (latent, expanded) = map(kept, ("llama-2-7b", "llama-2-70b", "deepseek-v3"))
    return [
        Correction(
            "a feed-forward layer takes 2 T d d_ff FLOPs",
            f"{feed_forward('gpt2', 768, 3072):.0f} T d d_ff, as it has two matrices; "
            f"{feed_forward('llama-2-7b', 4096, 11008):.0f} T d d_ff where it is gated",
            "parity size gpt2",
        ),
        Correction(
            "N = 12 L d^2 + V d, embeddings included",
            f"V d counts twice where the head is not tied: {shared:,} more in Llama 2 7B, of {llama.parameters:,}",
            "parity size llama-2-7b",
        ),
        Correction(
            "of a mixture of experts a token uses total x k / n",
            f"attention, head, routers and shared experts are used in full: {mixtral.used:,} of Mixtral 8x7B, not "
            f"{mixtral.parameters * 2 // 8:,}; {deepseek.used:,} of DeepSeek-V3, not "
            f"{deepseek.parameters * 8 // 256:,}",
            "parity size mixtral-8x7b",
        ),
        Correction(
            "latent attention makes the cache 4 to 8 times smaller",
            f"{small.expanded / LATENT['kv_lora_rank']:.0f} times with latents of 512 for 32 heads of 128, "
            f"{small.expanded / small.cached:.1f} with the 64 rotated channels that it keeps, too; "
            f"{expanded / latent:.0f} in DeepSeek-V3: {latent} numbers of {expanded:,}",
            "parity size deepseek-v3",
        ),
        Correction(
            "Llama 2 has 8 key-value heads",
            f"70B has, and keeps {grouped:,} numbers per token and layer of {whole:,}; 7B has as many as heads, and "
            f"keeps all {full:,}",
            "parity size llama-2-7b",
        ),
        Correction(
            "GPT-2 XL has 1.5B parameters, Llama 2 70B has 70B",
            f"{of(MODELS['gpt2-xl']).parameters / 1e9:.2f}B and {of(MODELS['llama-2-70b']).parameters / 1e9:.1f}B",
            "parity size",
        ),
    ]
