"""Models that were published, as far as their configurations decide how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **shape}


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "bert", "vocab_size": 30522, "intermediate_size": 4 * width, **shape}


def _pre_norm(
    model_type: str, vocabulary: int, width: int, inner: int, layers: int, heads: int, groups: int, **others: Any
) -> dict[str, Any]:
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": groups}
    return {"model_type": model_type, "vocab_size": vocabulary, **shape, **attention, **others}


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    others = {"head_dim": 128, "tie_word_embeddings": tied}
    return _pre_norm("qwen3", 151936, width, inner, layers, heads, 8, **others)


def _qwen3_moe(width: int, inner: int, layers: int, heads: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _pre_norm("qwen3_moe", 151936, width, inner, layers, heads, 4, head_dim=128, **experts)


MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "llama-2-7b": _pre_norm("llama", 32000, 4096, 11008, 32, 32, 32),
    "llama-2-70b": _pre_norm("llama", 32000, 8192, 28672, 80, 64, 8),
    "llama-3-405b": _pre_norm("llama", 128256, 16384, 53248, 126, 128, 8),
    "mixtral-8x7b": _pre_norm("mixtral", 32000, 4096, 14336, 32, 32, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 1536),
    "deepseek-v3": _pre_norm("deepseek_v3", 129280, 7168, 18432, 61, 128, 128),
}
