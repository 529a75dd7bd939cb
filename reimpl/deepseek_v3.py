"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and after a few dense layers many small experts beside shared ones.

Parameters carry the names that they have in a checkpoint, except for the routed experts', which are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from reimpl.cache import Cache, LatentCache
from reimpl.config import GENERIC, LARGEST_SIZE, OUTPUTS, TRAINING, Config, ConfigError, between, divides, follows
from reimpl.decoder import CausalLM
from reimpl.feedforward import GatedFeedForward
from reimpl.latent_attention import LatentAttention
from reimpl.moe import Experts, GroupedRouter
from reimpl.norm import RMSNorm
from reimpl.pre_norm import PreNormConfig, PreNormLayer, PreNormModel, PreNormRotary
from reimpl.rope import Rope, yarn_magnitude
from reimpl.weights import Rule, stacked_experts

DeepseekV3RMSNorm = RMSNorm
DeepseekV3RotaryEmbedding = PreNormRotary


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(PreNormConfig):
    """The fields of config.json that change what DeepSeek-V3 computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        **dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"), TRAINING),
        "output_router_logits": OUTPUTS,
        "pretraining_tp": "equal results, computed in slices",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {
        **Config.ONLY,
        "model_type": "deepseek_v3",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    SIZES: ClassVar[tuple[str, ...]] = (
        *PreNormConfig.SIZES,
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "n_group",
    )

    max_position_embeddings: int = 4096
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    qk_head_dim: int
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 3
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        """head_dim is another name of the part of a head that turns, and every head makes keys of its own."""
        nope, rope = (read.get(name, getattr(cls, name)) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        if read.get("head_dim") is None:
            read["head_dim"] = rope
        if read.get("qk_head_dim") is None and isinstance(nope, int) and isinstance(rope, int):
            read["qk_head_dim"] = nope + rope
        super().complete(read)

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self.first_k_dense_replace, 0, LARGEST_SIZE, "first_k_dense_replace")
        if self.q_lora_rank is not None:
            between(self.q_lora_rank, 1, LARGEST_SIZE, "q_lora_rank")
        follows(self.num_key_value_heads, self.num_attention_heads, "num_key_value_heads", "num_attention_heads")
        follows(self.head_dim, self.qk_rope_head_dim, "head_dim", "qk_rope_head_dim")
        channels = self.qk_nope_head_dim + self.qk_rope_head_dim
        follows(self.qk_head_dim, channels, "qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim")
        self._check_groups()

    def _check_groups(self) -> None:
        divides(self.n_group, self.n_routed_experts, "n_group", "n_routed_experts")
        between(self.topk_group, 1, self.n_group, "topk_group")
        group = self.n_routed_experts // self.n_group
        between(self.num_experts_per_tok, 1, self.topk_group * group, "num_experts_per_tok")
        if self.topk_group < self.n_group and group < 2:
            raise ConfigError(
                f"n_group is {self.n_group} for {self.n_routed_experts} experts: a group scores the sum of its two best"
                " experts, so it needs two; correct one of them"
            )


class DeepseekV3MLP(GatedFeedForward):
    """SwiGLU: a dense layer's, or the shared experts side by side."""

    def __init__(self, config: DeepseekV3Config, intermediate_size: int | None = None) -> None:
        super().__init__(config.hidden_size, intermediate_size or config.intermediate_size, config.hidden_act)


class DeepseekV3Attention(LatentAttention):
    """Latent attention whose scores are sharpened where the context was extended. All layers are alike."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int = 0) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            q_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            value=config.v_head_dim,
            scale=softmax_scale(config),
            bias=config.attention_bias,
            dropout=config.attention_dropout,
            pairing="adjacent" if config.rope_interleave else "half",
        )


def softmax_scale(config: DeepseekV3Config) -> float:
    """1/sqrt(channels), times YaRN's magnitude for queries and again for keys, with `mscale_all_dim` as its weight.

    The rotary tables enlarge the channels that turn by a ratio of magnitudes; this reaches all channels.
    """
    rope = Rope(config.rope_parameters, config.qk_rope_head_dim, config.max_position_embeddings)
    weight = rope.fields.get("mscale_all_dim")
    return config.qk_head_dim**-0.5 * (yarn_magnitude(rope.extension, weight) ** 2 if weight else 1.0)


class DeepseekV3MoE(nn.Module):
    """Each token goes to the routed experts that its router chooses, and to the shared ones."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        size, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate = GroupedRouter(
            size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            groups=config.n_group,
            chosen_groups=config.topk_group,
            renormalise=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        )
        self.experts = Experts(config.n_routed_experts, size, hidden, config.hidden_act)
        self.shared_experts = DeepseekV3MLP(config, hidden * config.n_shared_experts)

    def forward(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch seq size"]:
        tokens = x.flatten(0, 1)
        routing = self.gate(tokens)
        return self.experts(tokens, routing.experts, routing.weights).view_as(x) + self.shared_experts(x)


class DeepseekV3DecoderLayer(PreNormLayer):
    """Latent attention, then a dense mlp in the first layers and experts in the others."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int = 0) -> None:
        dense = layer_idx < config.first_k_dense_replace
        mlp = DeepseekV3MLP(config) if dense else DeepseekV3MoE(config)
        super().__init__(config, DeepseekV3Attention(config, layer_idx), mlp)


class DeepseekV3Model(PreNormModel):
    """DeepSeek-V3 without its head."""

    LAYER = DeepseekV3DecoderLayer

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache of latents, with room for `capacity` tokens where the number is known."""
        return Cache(LatentCache(capacity) for _ in self.layers)


class DeepseekV3ForCausalLM(CausalLM):
    """DeepSeek-V3 with its head, tied to the embeddings if the configuration says so."""

    CONFIG = DeepseekV3Config
    DECODER = DeepseekV3Model

    @classmethod
    def weight_rules(cls, config: DeepseekV3Config) -> tuple[Rule, ...]:
        """On disk every routed expert is by itself."""
        rules = super().weight_rules(config)
        for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
            rules += stacked_experts(f"model.layers.{layer}.mlp.experts", config.n_routed_experts)
        return rules
