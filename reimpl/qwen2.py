"""Qwen2 (Yang et al. 2024, arXiv:2407.10671): Llama with biases of q, k and v, and a window in its upper layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from reimpl.attention import Attention
from reimpl.config import Config
from reimpl.decoder import CausalLM
from reimpl.feedforward import GatedFeedForward
from reimpl.norm import RMSNorm
from reimpl.pre_norm import LayeredWindowConfig, PreNormLayer, PreNormModel, PreNormRotary

Qwen2RMSNorm = RMSNorm
Qwen2RotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LayeredWindowConfig):
    """The fields of config.json that change what Qwen2 computes."""

    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "qwen2"}

    max_position_embeddings: int = 32768


class Qwen2MLP(GatedFeedForward):
    """SwiGLU."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class Qwen2Attention(Attention):
    """Grouped-query attention with rotated queries and keys; q, k and v have biases, the output has none."""

    def __init__(self, config: Qwen2Config, layer_idx: int = 0) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=True,
            dropout=config.attention_dropout,
        )
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)


class Qwen2DecoderLayer(PreNormLayer):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: Qwen2Config, layer_idx: int = 0) -> None:
        super().__init__(config, Qwen2Attention(config, layer_idx), Qwen2MLP(config))


class Qwen2Model(PreNormModel):
    """Qwen2 without its head."""

    LAYER = Qwen2DecoderLayer


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 with its head, tied to the embeddings if the configuration says so."""

    CONFIG = Qwen2Config
    DECODER = Qwen2Model
