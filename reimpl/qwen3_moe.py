"""Qwen3's mixture of experts (Yang et al. 2025, arXiv:2505.09388, section 2): many small experts, none shared.

Parameters carry the names that they have in a checkpoint, except for the experts', which are stacked.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from reimpl.config import GENERIC, OUTPUTS, TRAINING, Config, ConfigError, between, follows
from reimpl.decoder import CausalLM
from reimpl.feedforward import GatedFeedForward
from reimpl.moe import Experts, TopKRouter
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormConfig, PreNormLayer, PreNormModel, PreNormRotary
from reimpl.qwen3 import NormedAttention
from reimpl.weights import Rule, stacked_experts

Qwen3MoeRMSNorm = RMSNorm
Qwen3MoeRotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(PreNormConfig):
    """The fields of config.json that change what Qwen3's mixture of experts computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        "max_window_layers": "all layers have the window, or none",
        "output_router_logits": OUTPUTS,
        "router_aux_loss_coef": TRAINING,
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "qwen3_moe"}
    SIZES: ClassVar[tuple[str, ...]] = (
        *PreNormConfig.SIZES,
        "moe_intermediate_size",
        "num_experts",
        "decoder_sparse_step",
    )

    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    moe_intermediate_size: int = 768
    num_experts: int
    num_local_experts: int
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence = ()

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        """transformers writes num_local_experts today, while checkpoints have num_experts."""
        count = read.get("num_experts", read.get("num_local_experts", 128))
        read |= {"num_local_experts": count, **read, "num_experts": count}
        if read.get("mlp_only_layers") is None:
            read["mlp_only_layers"] = ()
        super().complete(read)

    def __post_init__(self) -> None:
        super().__post_init__()
        follows(self.num_local_experts, self.num_experts, "num_local_experts", "num_experts")
        between(self.num_experts_per_tok, 1, self.num_experts, "num_experts_per_tok")
        for layer in self.mlp_only_layers:
            if type(layer) is not int:
                raise ConfigError(f"mlp_only_layers holds {layer!r}: correct it to the numbers of layers, from 0")
        if self.sliding_window is not None:
            between(self.sliding_window, 1, sys.maxsize, "sliding_window")

    @property
    def windows(self) -> Sequence[int | None]:
        """The same window for each layer, or none."""
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers

    def has_experts(self, layer_idx: int) -> bool:
        """Whether a layer has them: every `decoder_sparse_step`-th, unless mlp_only_layers names it."""
        return layer_idx not in self.mlp_only_layers and (layer_idx + 1) % self.decoder_sparse_step == 0


class Qwen3MoeMLP(GatedFeedForward):
    """SwiGLU, in the layers without experts."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class Qwen3MoeAttention(NormedAttention):
    """Attention with normed queries and keys. All layers are alike."""

    def __init__(self, config: Qwen3MoeConfig, layer_idx: int = 0) -> None:
        super().__init__(config, config.attention_bias)


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Each token goes to the likeliest experts, with their probabilities, renormalised or not, for weights."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        experts, size = config.num_experts, config.hidden_size
        self.gate = TopKRouter(size, experts, config.num_experts_per_tok, config.norm_topk_prob)
        self.experts = Experts(experts, size, config.moe_intermediate_size, config.hidden_act)

    def forward(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch seq size"]:
        tokens = x.flatten(0, 1)
        routing = self.gate(tokens)
        return self.experts(tokens, routing.experts, routing.weights).view_as(x)


class Qwen3MoeDecoderLayer(PreNormLayer):
    """Attention, then experts or SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: Qwen3MoeConfig, layer_idx: int = 0) -> None:
        mlp = Qwen3MoeSparseMoeBlock(config) if config.has_experts(layer_idx) else Qwen3MoeMLP(config)
        super().__init__(config, Qwen3MoeAttention(config, layer_idx), mlp)


class Qwen3MoeModel(PreNormModel):
    """Qwen3's mixture of experts without its head."""

    LAYER = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3's mixture of experts with its head, tied to the embeddings if the configuration says so."""

    CONFIG = Qwen3MoeConfig
    DECODER = Qwen3MoeModel

    @classmethod
    def weight_rules(cls, config: Qwen3MoeConfig) -> tuple[Rule, ...]:
        """On disk every expert is by itself."""
        rules = super().weight_rules(config)
        for layer in filter(config.has_experts, range(config.num_hidden_layers)):
            rules += stacked_experts(f"model.layers.{layer}.mlp.experts", config.num_experts)
        return rules
