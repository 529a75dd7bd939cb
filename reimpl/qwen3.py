"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): Qwen2 with normed queries and keys in place of biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from reimpl.attention import Attention
from reimpl.config import Config
from reimpl.decoder import CausalLM
from reimpl.feedforward import GatedFeedForward
from reimpl.norm import RMSNorm
from reimpl.pre_norm import LayeredWindowConfig, PreNormConfig, PreNormLayer, PreNormModel, PreNormRotary

Qwen3RMSNorm = RMSNorm
Qwen3RotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LayeredWindowConfig):
    """The fields of config.json that change what Qwen3 computes."""

    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "qwen3"}

    head_dim: int = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        """A head is 128 wide where config.json leaves it out, whatever hidden_size and heads are."""
        read.setdefault("head_dim", 128)
        super().complete(read)


class Qwen3MLP(GatedFeedForward):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class NormedAttention(Attention):
    """Grouped-query attention whose queries and keys are normed in each head, before they are rotated (section 2)."""

    def __init__(self, config: PreNormConfig, bias: bool) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=bias,
            dropout=config.attention_dropout,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(
        self, x: Float[Tensor, "batch seq size"]
    ) -> tuple[
        Float[Tensor, "batch heads seq dim"],
        Float[Tensor, "batch kv_heads seq dim"],
        Float[Tensor, "batch kv_heads seq dim"],
    ]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3Attention(NormedAttention):
    """Attention with normed queries and keys. All layers are alike but for their windows."""

    def __init__(self, config: Qwen3Config, layer_idx: int = 0) -> None:
        super().__init__(config, config.attention_bias)


class Qwen3DecoderLayer(PreNormLayer):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: Qwen3Config, layer_idx: int = 0) -> None:
        super().__init__(config, Qwen3Attention(config, layer_idx), Qwen3MLP(config))


class Qwen3Model(PreNormModel):
    """Qwen3 without its head."""

    LAYER = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its head, tied to the embeddings if the configuration says so."""

    CONFIG = Qwen3Config
    DECODER = Qwen3Model
