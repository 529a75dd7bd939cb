"""Gaps of single models: GPT-2, BLOOM, experts, recurrences."""

from __future__ import annotations

from dataclasses import replace

from parity.family import Kind
from parity.gaps.gap import EVERY, Gap, Place, without

# GPT-2

GPT2_SCALES = Gap(
    "gpt2-scales",
    "gpt2: GPT2Attention and all that hold it, eager against sdpa",
    ("transformers>=4.57.6,<5",),
    "sdpa ignores scale_attn_weights and scale_attn_by_inverse_layer_idx",
    "transformers#44380",
    lambda place: (
        place.model_type == "gpt2"
        and place.layer.kind.attends
        and (not place.config.scale_attn_weights or place.config.scale_attn_by_inverse_layer_idx)
    ),
    without("scaled", "by_layer"),
)

GPT2_UPCAST = Gap(
    "gpt2-upcast",
    "gpt2: GPT2Attention and all that hold it, eager against sdpa",
    EVERY,
    "with reorder_and_upcast_attn eager fails in float64, while sdpa ignores the option",
    "eager checks that its scores are float32",
    avoided="parity/families/gpt2.py",
)

# BLOOM

BLOOM_GELU = Gap(
    "bloom-gelu",
    "bloom: BloomMLP and all that hold it; before version 5 in training only",
    EVERY,
    "the gradient of its GELU is not that of its value: off by 5e-12 where inputs are negative",
    "it is written out, with a coefficient cut to ten digits; the model was trained with it",
    avoided="reimpl/bloom.py",
)

# Experts

JITTER_IN_PLACE = Gap(
    "jitter-in-place",
    "mixtral: MixtralSparseMoeBlock",
    EVERY,
    "in training with router_jitter_noise the caller's hidden states are multiplied in place",
    "an in-place product before the router, so that experts get the noise, too; compare transformers#33969",
    avoided="parity/axes.py",
)

QWEN3_MOE_DENSE = Gap(
    "qwen3-moe-dense",
    "qwen3_moe: Qwen3MoeForCausalLM without any layer of experts",
    ("transformers>=5.8",),
    "asked for router logits it raises an IndexError, though without them it computes",
    "no router was recorded, and the load-balancing loss of none is not thought of",
    avoided="parity/reference.py",
)

# Recurrences

MAMBA_CHUNKS = Gap(
    "mamba-chunks",
    "mamba: MambaMixer and all that hold it, with a cache",
    EVERY,
    "a chunk of several tokens after the first begins anew, though the cache holds a state",
    "the scan is given no state to begin from; single tokens are",
    avoided="parity/families/mamba.py",
)

MAMBA_MASK = Gap(
    "mamba-mask",
    "mamba: all models, with a cache",
    EVERY,
    "the mask of a decoding step must be that of the new token alone; under that of all tokens it goes wrong",
    "hidden states are multiplied by the mask, which broadcasts; models that attend want that of all tokens",
    avoided="parity/reference.py",
)


def _single_tokens_of_rows(place: Place) -> bool:
    if place.model_type != "rwkv" or place.scenario.rows == 1 or not place.layer.recurrent:
        return False
    return place.prop == "generation" or (place.prop == "forward" and 1 in place.scenario.schedule)


RWKV_ROWS = Gap(
    "rwkv-rows",
    "rwkv: RwkvSelfAttention, RwkvFeedForward and all that hold them, with a state",
    EVERY,
    "given one token of each of several rows, it returns as many tokens per row as there are rows",
    "the tokens before, [rows, hidden], broadcast against those of now, [rows, 1, hidden]",
    _single_tokens_of_rows,
    lambda scenario: replace(scenario, batch=1, stack=1, padding=()),
    "parity/properties/generation.py",
)

RWKV_RESCALED = Gap(
    "rwkv-rescaled",
    "rwkv: all models in evaluation, where rescale_every is not 0",
    EVERY,
    "gradients of the weights that the first pass divides in place are those of the divided weights",
    "meant for inference; in training nothing is divided",
    lambda place: (
        place.model_type == "rwkv"
        and place.prop == "gradients"
        and place.layer.kind is Kind.MODEL
        and 0 < place.config.rescale_every < place.config.num_hidden_layers
    ),
    without("rescale"),
    "parity/families/rwkv.py",
)

RWKV_EPS = Gap(
    "rwkv-eps",
    "rwkv: RwkvModel and all that hold it",
    EVERY,
    "the last norm takes 1e-5 for its epsilon, while all others take layer_norm_epsilon",
    "it is built without one",
    avoided="parity/families/rwkv.py",
)

RWKV_WIDTH = Gap(
    "rwkv-width",
    "rwkv: RwkvSelfAttention and all that hold it, with a state",
    EVERY,
    "where attention_hidden_size is not hidden_size, a call without a state computes, one with a state fails",
    "the model makes all states as wide as hidden states",
    avoided="parity/families/rwkv.py",
)

RWKV_ONE_LAYER = Gap(
    "rwkv-one-layer",
    "rwkv: RwkvModel and all that hold it",
    EVERY,
    "a model of one layer cannot be built, though such a configuration can",
    "its initialisation divides by the number of layers less one",
    avoided="parity/families/rwkv.py",
)
