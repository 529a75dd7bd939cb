"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama without biases, with one sliding window for all layers."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from reimpl.attention import Attention
from reimpl.config import Config, between
from reimpl.decoder import CausalLM
from reimpl.feedforward import GatedFeedForward
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormConfig, PreNormLayer, PreNormModel, PreNormRotary

MistralRMSNorm = RMSNorm
MistralRotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class MistralConfig(PreNormConfig):
    """The fields of config.json that change what Mistral computes."""

    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "mistral"}

    max_position_embeddings: int = 4096 * 32
    sliding_window: int | None = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            between(self.sliding_window, 1, sys.maxsize, "sliding_window")

    @property
    def windows(self) -> Sequence[int | None]:
        """The same window for each layer, or none."""
        return (self.sliding_window,) * self.num_hidden_layers


class MistralMLP(GatedFeedForward):
    """SwiGLU."""

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class MistralAttention(Attention):
    """Grouped-query attention with rotated queries and keys, and no biases."""

    def __init__(self, config: MistralConfig, layer_idx: int = 0) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            dropout=config.attention_dropout,
        )


class MistralDecoderLayer(PreNormLayer):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: MistralConfig, layer_idx: int = 0) -> None:
        super().__init__(config, MistralAttention(config, layer_idx), MistralMLP(config))


class MistralModel(PreNormModel):
    """Mistral without its head."""

    LAYER = MistralDecoderLayer


class MistralForCausalLM(CausalLM):
    """Mistral with its head, tied to the embeddings if the configuration says so."""

    CONFIG = MistralConfig
    DECODER = MistralModel
