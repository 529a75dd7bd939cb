"""Llama (Touvron et al. 2023, arXiv:2302.13971; grouped heads: arXiv:2307.09288; scaled rotation: arXiv:2407.21783).

Parameters carry the names that they have in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reimpl.attention import Attention
from reimpl.config import GENERIC, ORIGIN, Config
from reimpl.decoder import CausalLM
from reimpl.feedforward import GatedFeedForward
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormConfig, PreNormLayer, PreNormModel, PreNormRotary

LlamaRMSNorm = RMSNorm
LlamaRotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(PreNormConfig):
    """The fields of config.json that change what Llama computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        "pretraining_tp": "equal results, computed in slices",
        "is_llama_config": ORIGIN,
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "llama", "rope_interleaved": False}

    attention_bias: bool = False
    mlp_bias: bool = False


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


class LlamaDecoderLayer(PreNormLayer):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, layer_idx: int = 0) -> None:
        super().__init__(config, LlamaAttention(config, layer_idx), LlamaMLP(config))


class LlamaModel(PreNormModel):
    """Llama without its head."""

    LAYER = LlamaDecoderLayer


class LlamaForCausalLM(CausalLM):
    """Llama with its head, tied to the embeddings if the configuration says so."""

    CONFIG = LlamaConfig
    DECODER = LlamaModel
