"""Layers of LitGPT, held against those of transformers.

    pip install litgpt==0.5.13
    parity check litgpt.model:CausalSelfAttention --against llama:LlamaAttention \\
        --adapter examples/litgpt/adapters.py:Attention --weights examples/litgpt/attention.toml
    parity check litgpt.model:CausalSelfAttention --against qwen3:Qwen3Attention \\
        --adapter examples/litgpt/adapters.py:Attention --weights examples/litgpt/qwen3.toml
    parity check litgpt.model:LLaMAMoE --against mixtral:MixtralSparseMoeBlock \\
        --adapter examples/litgpt/adapters.py:Experts
    parity check litgpt.model:MultiheadLatentAttention --against deepseek_v3:DeepseekV3Attention \\
        --adapter examples/litgpt/adapters.py:LatentAttention --point 0
    parity check litgpt.model:LLaMAMoE --against deepseek_v3:DeepseekV3MoE \\
        --adapter examples/litgpt/adapters.py:GroupedExperts

Found with litgpt 0.5.13 and transformers 5.24.0:

* The first three hold, in all dtypes.
* The norms of the latents take the configuration's `norm_eps`, where the reference takes 1e-6, as the code does that
  DeepSeek-V3 was published with; no difference for checkpoints whose `rms_norm_eps` is 1e-6. In bfloat16 it is too
  small to be seen. It has no biases of q_a, kv_a and o alone, hence `--point 0`.
* The router fills the groups that are left out with 0 instead of minus infinity, so that their experts win where all
  others have a negative score: transformers did so before 5.6 (transformers#45440). The routing verdict fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from litgpt.config import Config
from torch import nn

from parity.check.adapter import Adapter, Constructed, Recorded
from parity.check.rules import Turned
from reimpl.weights import Same, Stacked

ROOM = 64  # tokens that a cache has room for


def common(config: Any) -> dict[str, Any]:
    """The fields that every layer of theirs reads, by their names."""
    return {
        "name": config.model_type,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_query_groups": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "norm_class_name": "RMSNorm",
        "norm_eps": config.rms_norm_eps,
        "rotary_percentage": 1.0,
        "bias": bool(getattr(config, "attention_bias", False)),
        "rope_adjustments": None if config.rope_parameters["rope_type"] == "default" else dict(config.rope_parameters),
    }


class Attention(Adapter):
    """Grouped-query attention, with the norms of q and k where the reference has them."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        config = constructed.config
        window = getattr(config, "sliding_window", None)
        fields = common(config) | {
            "head_size": config.head_dim,
            "norm_qk": config.model_type.startswith("qwen3"),
            "sliding_window_size": window,
        }
        return cls(Config(**fields), constructed.layer_idx or 0)

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        seen = 0
        module.kv_cache = cache = self.room(module, len(recorded.x), recorded.dtype)
        for k, v in recorded.past:
            seen = k.shape[2]
            cache.k[:, :, :seen], cache.v[:, :, :seen] = k, v
        return self.step(module, recorded, seen)

    def step(self, module: Any, recorded: Recorded, seen: int) -> Any:
        """Go on after so many tokens in the cache."""
        x, kept, end = recorded.x, recorded.may_attend, seen + recorded.x.shape[1]
        if kept is None:
            kept = torch.ones(1, 1, x.shape[1], end, dtype=torch.bool).tril(seen)
        output = module(x, recorded.cos, recorded.sin, kept, torch.arange(seen, end), end)
        return output, (module.kv_cache.k[:, :, :end], module.kv_cache.v[:, :, :end])

    def room(self, module: Any, rows: int, dtype: torch.dtype) -> nn.Module:
        """An empty cache of theirs."""
        return module.build_kv_cache(rows, ROOM, module.config.rope_n_elem, dtype=dtype)


class LatentAttention(Attention):
    """Multi-head latent attention. Its cache holds keys and values of every head, so it is not compared."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        config = constructed.config
        names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        fields = common(config) | {
            "latent_attention": {name: getattr(config, name) for name in names},
            "rope_interleave": config.rope_interleave,
            "head_size": config.qk_head_dim,
            "bias": False,
        }
        return cls(Config(**fields), constructed.layer_idx or 0)

    def room(self, module: Any, rows: int, dtype: torch.dtype) -> nn.Module:
        return module.build_kv_cache(rows, ROOM, dtype=dtype)

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        state, rows = recorded.state, len(recorded.x)
        if not state:
            state |= {"cache": self.room(module, rows, recorded.dtype), "seen": 0}
        module.kv_cache, seen = state["cache"], state["seen"]
        state["seen"] = seen + recorded.x.shape[1]
        output, _ = self.step(module, recorded, seen)
        return output, None


class Experts(Adapter):
    """A mixture of experts whose router takes a softmax over the chosen."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        config = constructed.config
        fields = common(config) | {
            "n_expert": config.num_local_experts,
            "n_expert_per_token": config.num_experts_per_tok,
            "mlp_class_name": "LLaMAMoE",
            "head_size": 8,
            "bias": False,
        }
        return cls(Config(**fields))

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        return module(recorded.x), None

    def rules(self, config: Any, reference: Mapping[str, torch.Tensor]) -> list[Any]:
        """Theirs are an expert each, where the reference has stacks of them, gate above up."""
        owners = [f"experts.{expert}" for expert in range(len(reference["experts.down_proj"]))]
        gate_up = tuple((f"{owner}.fc_1.weight", f"{owner}.fc_2.weight") for owner in owners)
        down = tuple(f"{owner}.proj.weight" for owner in owners)
        shared = {"gate_proj": "fc_1", "up_proj": "fc_2", "down_proj": "proj"}
        return [
            Turned(Stacked(gate_up, "experts.gate_up_proj")),
            Turned(Stacked(down, "experts.down_proj")),
            *(
                Same(name, name.replace(part, ours))
                for name in reference
                for part, ours in shared.items()
                if name == f"shared_experts.{part}.weight"
            ),
        ]


class GroupedExperts(Experts):
    """DeepSeek-V3's mixture of experts, with its grouped router and its shared experts."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        config = constructed.config
        fields = common(config) | {
            "n_expert": config.n_routed_experts,
            "n_shared_expert": config.n_shared_experts,
            "n_expert_groups": config.n_group,
            "n_topk_groups": config.topk_group,
            "n_topk_scores_per_group": 2,
            "n_expert_per_token": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "routed_scaling_factor": config.routed_scaling_factor,
            "norm_topk_prob": config.norm_topk_prob,
            "mlp_class_name": "LLaMAMoE",
            "head_size": 8,
            "bias": False,
        }
        return cls(Config(**fields))
