"""DeepSeek-V3: latent attention, dense layers first, then experts that a grouped sigmoid router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity import axes
from parity.family import Axis, Family, Kind, Layer
from parity.scenario import AxisValue
from parity.tiny import sizes
from reimpl import deepseek_v3

YARN: Mapping[str, Mapping[str, float]] = {
    "yarn-1-1": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-0.7-1.3": {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-0.7": {"mscale": 0.7},
    "yarn--1.3": {"mscale_all_dim": 1.3},
}
"""YaRN with mscale, mscale_all_dim or both: they enlarge the rotary tables, and the softmax scale, each by its rule."""

ATTENTION = ("heads", "ranks", "head", "interleave", "bias", "rope", "theta", "form", "attend")
EXPERTS = ("experts", "norm", "factor", "shared", "act", "dispatch")
BLOCK = (*ATTENTION, *EXPERTS, "dense", "eps")
AXES = (
    Axis("heads", (2, 1, 4, 3), "heads; keys and values have as many"),
    Axis("ranks", ("12/10", "0/10", "14/16", "0/6"), "q_lora_rank (0 for none) / kv_lora_rank"),
    Axis("head", ("6/4/5", "4/8/6", "10/6/3", "4/4/4"), "channels without position / that turn / of a value"),
    Axis("interleave", (True, False), "rope_interleave"),
    Axis("bias", (False, True), "biases of q_a, kv_a and o (attention_bias)"),
    Axis("rope", (*axes.ROPE.choices, *YARN), "scaling of the rotary frequencies (rope_type, mscale, mscale_all_dim)"),
    axes.THETA,
    Axis("experts", ("4/1/1/2", "8/4/2/3", "12/3/2/5", "8/2/1/4", "8/4/4/1"), "experts / groups / kept / chosen"),
    axes.MANY,
    axes.DISPATCH,
    Axis("norm", (True, False), "whether the weights of the chosen sum to 1 (norm_topk_prob)"),
    Axis("factor", (2.5, 1.0), "routed_scaling_factor"),
    Axis("shared", (1, 2), "n_shared_experts"),
    Axis("dense", (0, 1, 2), "layers without experts, the first ones (first_k_dense_replace)"),
    axes.EPS,
    axes.ACT,
    axes.LAYERS,
    axes.TIE,
    Axis("form", ("auto", "expanded", "absorbed"), "our form of latent attention"),
    axes.ATTEND,
)


def configure(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """Keyword arguments of DeepseekV3Config for a point of the configuration space."""
    heads = int(point["heads"])
    q_rank, kv_rank = _numbers(point["ranks"])
    nope, rope, value = _numbers(point["head"])
    experts, groups, kept, chosen = _numbers(point["experts"])
    if point["many"]:
        experts, groups, kept, chosen = int(point["many"]), 8, 4, 8
    fields = {
        "hidden_size": 48 if heads == 3 else 40,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank or None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "rope_interleave": point["interleave"],
        "attention_bias": point["bias"],
        "rope_parameters": _rope_parameters(point, rope),
        "max_position_embeddings": axes.MAX_LENGTH,
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": point["norm"],
        "routed_scaling_factor": point["factor"],
        "n_shared_experts": point["shared"],
        "first_k_dense_replace": point["dense"],
        "rms_norm_eps": point["eps"],
        "hidden_act": point["act"],
        "num_hidden_layers": point["layers"],
        "tie_word_embeddings": point["tie"],
    }
    return sizes.config("deepseek_v3", **fields)


def _numbers(choice: AxisValue) -> list[int]:
    return [int(number) for number in str(choice).split("/")]


def _rope_parameters(point: Mapping[str, AxisValue], rotary: int) -> dict[str, Any]:
    mscales = YARN.get(str(point["rope"]))
    if mscales is None:
        return axes.rope_parameters(point, rotary)
    return {**axes.rope_parameters({**point, "rope": "yarn"}, rotary), **mscales}


FAMILY = Family(
    model_type="deepseek_v3",
    axes=AXES,
    configure=configure,
    config=deepseek_v3.DeepseekV3Config,
    rotary="DeepseekV3RotaryEmbedding",
    turned=(),  # a part of each head turns, in pairs that the configuration names
    rules=deepseek_v3.DeepseekV3ForCausalLM.weight_rules,
    implementations=(
        {"_attn_implementation": "eager", "_experts_implementation": "eager"},
        {"_attn_implementation": "sdpa", "_experts_implementation": "batched_mm"},
        {"_attn_implementation": "sdpa", "_experts_implementation": "grouped_mm"},
    ),
    layers=(
        Layer(
            "norm",
            Kind.POINTWISE,
            "DeepseekV3RMSNorm",
            lambda config: deepseek_v3.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps),
            at="model.layers.0.input_layernorm.",
            axes=("eps",),
            arguments=lambda config: {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps},
        ),
        Layer(
            "rotary",
            Kind.ROTARY,
            "DeepseekV3RotaryEmbedding",
            deepseek_v3.DeepseekV3RotaryEmbedding,
            at="model.rotary_emb.",
            axes=("head", "rope", "theta"),
        ),
        Layer(
            "mlp",
            Kind.POINTWISE,
            "DeepseekV3MLP",
            deepseek_v3.DeepseekV3MLP,
            at="model.layers.0.mlp.",
            axes=("act",),
            fixed=(("dense", 1),),
        ),
        Layer(
            "attention",
            Kind.ATTENTION,
            "DeepseekV3Attention",
            deepseek_v3.DeepseekV3Attention,
            at="model.layers.0.self_attn.",
            axes=ATTENTION,
            scales=(1.0, 1e-3),
        ),
        Layer(
            "moe",
            Kind.POINTWISE,
            "DeepseekV3MoE",
            deepseek_v3.DeepseekV3MoE,
            at="model.layers.0.mlp.",
            axes=(*EXPERTS, "many"),
            scales=(1.0, 1e-3),
            routes=True,
        ),
        Layer(
            "block",
            Kind.ATTENTION,
            "DeepseekV3DecoderLayer",
            deepseek_v3.DeepseekV3DecoderLayer,
            at="model.layers.0.",
            axes=BLOCK,
            routes=True,
        ),
        Layer(
            "model",
            Kind.MODEL,
            "DeepseekV3Model",
            deepseek_v3.DeepseekV3Model,
            at="model.",
            axes=(*BLOCK, "layers"),
            routes=True,
        ),
        Layer(
            "logits",
            Kind.MODEL,
            "DeepseekV3ForCausalLM",
            deepseek_v3.DeepseekV3ForCausalLM,
            at="",
            axes=(*BLOCK, "layers", "tie"),
            generates=True,
            routes=True,
        ),
    ),
)
