"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Llama with a mixture of experts in place of the feed-forward layer.

Parameters carry the names that they have in a checkpoint, except for the experts', which are stacked.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reimpl.attention import Attention
from reimpl.cache import GrowingCache
from reimpl.config import GENERIC, OUTPUTS, TRAINING, Config, between, check_rope, divides, known_activation, shared
from reimpl.decoder import CausalLM, Decoder
from reimpl.mask import Mask
from reimpl.moe import Experts, TopKRouter
from reimpl.norm import RMSNorm
from reimpl.rope import RotaryEmbedding
from reimpl.weights import Rule, Stacked


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(Config):
    """The fields of config.json that change what Mixtral computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        "output_router_logits": OUTPUTS,
        "router_aux_loss_coef": TRAINING,
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "mixtral"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_local_experts",
        "num_experts_per_tok",
    )

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_jitter_noise: float = 0.0
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping
    sliding_window: int | None = None
    attention_dropout: float = 0.0
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
        between(self.router_jitter_noise, 0, 1, "router_jitter_noise")
        between(self.num_experts_per_tok, 1, self.num_local_experts, "num_experts_per_tok")
        if self.sliding_window is not None:
            between(self.sliding_window, 1, sys.maxsize, "sliding_window")
        if self.pad_token_id is not None:
            between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")
        divides(self.num_key_value_heads, self.num_attention_heads, "num_key_value_heads", "num_attention_heads")
        known_activation(self.hidden_act, "hidden_act")
        check_rope(self.rope_parameters, self.head_dim, self.max_position_embeddings)


class MixtralRMSNorm(RMSNorm):
    """Mixtral normalises by the root mean square."""


class MixtralRotaryEmbedding(RotaryEmbedding):
    """The tables of the rotation, computed once for all layers."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config.rope_parameters, config.head_dim, config.max_position_embeddings)


class MixtralAttention(Attention):
    """Grouped-query attention with rotated queries and keys, and no biases."""

    def __init__(self, config: MixtralConfig, layer_idx: int = 0) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            dropout=config.attention_dropout,
        )


class MixtralSparseMoeBlock(nn.Module):
    """Each token goes to the likeliest experts. In training its channels are jittered first, for router and experts."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        experts, size = config.num_local_experts, config.hidden_size
        self.gate = TopKRouter(size, experts, config.num_experts_per_tok)
        self.experts = Experts(experts, size, config.intermediate_size, config.hidden_act)
        self.jitter = config.router_jitter_noise

    def forward(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch seq size"]:
        if self.training and self.jitter > 0:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        tokens = x.flatten(0, 1)
        routing = self.gate(tokens)
        return self.experts(tokens, routing.experts, routing.weights).view_as(x)


class MixtralDecoderLayer(nn.Module):
    """z = x + attention(norm(x)); y = z + experts(norm(z))."""

    def __init__(self, config: MixtralConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.input_layernorm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MixtralAttention(config, layer_idx)
        self.post_attention_layernorm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = MixtralSparseMoeBlock(config)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rotary: tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]] | None = None,
        mask: Mask = None,
        cache: GrowingCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        z = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
        return z + self.block_sparse_moe(self.post_attention_layernorm(z))


class MixtralModel(Decoder):
    """Embeddings, layers and a final norm; all layers have the same sliding window, or none."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(
            nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id),
            (MixtralDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)),
            MixtralRMSNorm(config.hidden_size, config.rms_norm_eps),
            MixtralRotaryEmbedding(config),
            windows=[config.sliding_window] * config.num_hidden_layers,
        )


class MixtralForCausalLM(CausalLM):
    """Mixtral with its head, tied to the embeddings if the configuration says so."""

    CONFIG = MixtralConfig
    DECODER = MixtralModel

    @classmethod
    def weight_rules(cls, config: MixtralConfig) -> tuple[Rule, ...]:
        """On disk every expert is by itself: w1 is the gate, w3 up, w2 down."""
        rules = super().weight_rules(config)
        for layer in range(config.num_hidden_layers):
            experts = f"model.layers.{layer}.block_sparse_moe.experts"
            parts = [f"{experts}.{expert}" for expert in range(config.num_local_experts)]
            rules += (
                Stacked(tuple((f"{part}.w1.weight", f"{part}.w3.weight") for part in parts), f"{experts}.gate_up_proj"),
                Stacked(tuple(f"{part}.w2.weight" for part in parts), f"{experts}.down_proj"),
            )
        return rules
