"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with a mixture of experts in place of the feed-forward layer.

Parameters carry the names that they have in a checkpoint, except for the experts', which are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reimpl.cache import GrowingCache
from reimpl.config import GENERIC, OUTPUTS, TRAINING, Config, between
from reimpl.decoder import CausalLM
from reimpl.mask import Mask
from reimpl.mistral import MistralAttention, MistralConfig
from reimpl.moe import Experts, TopKRouter
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormModel, PreNormRotary
from reimpl.weights import Rule, stacked_experts

MixtralRMSNorm = RMSNorm
MixtralRotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    """The fields of config.json that change what Mixtral computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        "output_router_logits": OUTPUTS,
        "router_aux_loss_coef": TRAINING,
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "mixtral"}
    SIZES: ClassVar[tuple[str, ...]] = (*MistralConfig.SIZES, "num_local_experts")

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_jitter_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self.router_jitter_noise, 0, 1, "router_jitter_noise")
        between(self.num_experts_per_tok, 1, self.num_local_experts, "num_experts_per_tok")


class MixtralAttention(MistralAttention):
    """Mistral's attention."""


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


class MixtralModel(PreNormModel):
    """Mixtral without its head."""

    LAYER = MixtralDecoderLayer


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
            rules += stacked_experts(experts, config.num_local_experts, gate="w1", up="w3", down="w2")
        return rules
