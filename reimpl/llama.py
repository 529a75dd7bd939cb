"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped heads: arXiv:2307.09288; scaled rotation: arXiv:2407.21783).

Parameters carry the names that they have in a checkpoint.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from reimpl.attention import Attention
from reimpl.cache import GrowingCache
from reimpl.config import GENERIC, Config, between, check_rope, divides, known_activation, shared
from reimpl.decoder import CausalLM, Decoder
from reimpl.feedforward import GatedFeedForward
from reimpl.mask import Mask
from reimpl.norm import RMSNorm
from reimpl.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """The fields of config.json that change what Llama computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {**GENERIC, "pretraining_tp": "equal results, computed in slices"}
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "llama"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        if read.get("num_key_value_heads") is None:
            read["num_key_value_heads"] = read.get("num_attention_heads")
        if read.get("head_dim") is None:
            read["head_dim"] = shared(read, "hidden_size", "num_attention_heads")

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self.max_position_embeddings, 1, sys.maxsize, "max_position_embeddings")
        between(self.rms_norm_eps, 0, 1, "rms_norm_eps")
        between(self.attention_dropout, 0, 1, "attention_dropout")
        if self.pad_token_id is not None:
            between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")
        divides(self.num_key_value_heads, self.num_attention_heads, "num_key_value_heads", "num_attention_heads")
        known_activation(self.hidden_act, "hidden_act")
        check_rope(self.rope_parameters, self.head_dim, self.max_position_embeddings)


class LlamaRMSNorm(RMSNorm):
    """Llama normalises by the root mean square."""


class LlamaRotaryEmbedding(RotaryEmbedding):
    """The tables of the rotation, computed once for all layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.rope_parameters, config.head_dim, config.max_position_embeddings)


class LlamaMLP(GatedFeedForward):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)


class LlamaAttention(Attention):
    """Grouped-query attention with rotated queries and keys. All layers are alike, whatever their index."""

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
        )


class LlamaDecoderLayer(nn.Module):
    """z = x + attention(norm(x)); y = z + mlp(norm(z))."""

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer_idx)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rotary: tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]] | None = None,
        mask: Mask = None,
        cache: GrowingCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        z = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
        return z + self.mlp(self.post_attention_layernorm(z))


class LlamaModel(Decoder):
    """Embeddings, layers and a final norm; positions enter through the rotation alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(
            nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id),
            (LlamaDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)),
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps),
            LlamaRotaryEmbedding(config),
        )


class LlamaForCausalLM(CausalLM):
    """Llama with its head, tied to the embeddings if the configuration says so."""

    CONFIG = LlamaConfig
    DECODER = LlamaModel
