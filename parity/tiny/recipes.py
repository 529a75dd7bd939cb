"""Sizes by the words of a field's name, and the recipes that say how large each is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]

VOCABULARY = 101
ORIGINAL_LENGTH, LENGTH = 16, 64
WINDOW = 6


@dataclass(frozen=True)
class Recipe:
    """The sizes that a tiny configuration is given.

    Attributes:
        hidden, inner, heads, kv_heads, head_dim: the axes of attention and feed-forward.
        layers: at least so many.
        of_each_kind: so many layers are kept of each kind.
        filled: whether fields that are None get a value where their name tells which.
    """

    name: str
    hidden: int = 48
    inner: int = 56
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    experts: int = 5
    of_each_kind: int = 1
    filled: bool = False


RECIPES = (
    Recipe("lopsided"),
    Recipe("filled", filled=True),
    Recipe("powers of two", hidden=64, inner=96, heads=4, experts=8),
    Recipe("two layers of each kind", hidden=64, inner=96, heads=4, experts=8, of_each_kind=2),
    Recipe("powers of two, filled", hidden=64, inner=96, heads=4, experts=8, filled=True),
    Recipe("as many kv heads as heads", hidden=64, inner=96, heads=4, kv_heads=4, experts=8),
    Recipe("square", hidden=64, inner=64, heads=4, kv_heads=4, experts=4),
    Recipe("deeper", hidden=64, inner=96, heads=4, layers=4, experts=8),
    Recipe("wider", hidden=128, inner=128, heads=4, kv_heads=4, head_dim=32, layers=4, experts=8),
)
Rule = Callable[[Any, Recipe, Fields], Any]


def _at_most(limit: int) -> Rule:
    return lambda value, recipe, fields: min(value, limit)


def _experts(value: int, recipe: Recipe, fields: Fields) -> int:
    """Where experts are in groups, three groups of four."""
    groups = max(fields.get(name) or 1 for name in ("n_group", "num_expert_group", "num_expert_groups"))
    return 12 if groups > 1 else min(value, recipe.experts)


def _kernel(value: int, recipe: Recipe, fields: Fields) -> int:
    """Odd if it is, so that what is convolved keeps its length."""
    return min(value, 7 if value % 2 else 8)


def _kv_heads(value: int, recipe: Recipe, fields: Fields) -> int:
    """Latent attention has no fewer of them than heads; one of a single head stays."""
    return 1 if value == 1 else recipe.heads if "kv_lora_rank" in fields else recipe.kv_heads


def _head_dim(value: int, recipe: Recipe, fields: Fields) -> int:
    """Of latent attention it is another name of the part that turns."""
    if fields.get("qk_rope_head_dim") == value:
        return _ROPE_DIM
    if "qk_nope_head_dim" in fields:
        return _ROPE_DIM + _NOPE_DIM
    plain = fields.get("head_dim")
    return recipe.head_dim * (value // plain if plain and value % plain == 0 else 1)


def _rope_dim(value: int, recipe: Recipe, fields: Fields) -> int:
    """The part that turns, where that is a part of every head."""
    partial = fields.get("partial_rotary_factor")
    return max(2, int(recipe.head_dim * partial)) if partial and "head_dim" in fields else _ROPE_DIM


def _hidden(value: int, recipe: Recipe, fields: Fields) -> int:
    """As many times the hidden size as it is."""
    plain = fields.get("hidden_size") or fields.get("d_model") or value
    return recipe.hidden * (value // plain if value % plain == 0 else 1)


def _whole_head(value: int, recipe: Recipe, fields: Fields) -> int:
    return _ROPE_DIM + _NOPE_DIM


_ROPE_DIM, _NOPE_DIM = 4, 8

RULES: Sequence[tuple[str, Rule]] = (
    (r"^(acoustic|sampling|fft|hop|mel|num_mel)_", lambda v, r, f: v),
    (r"vocab_size|vocabulary|num_embeddings$|^max_2d_position|n_words|ngram_vocab", lambda v, r, f: min(v, VOCABULARY)),
    (r"^(num_|n_)?(hidden_|encoder_|decoder_|self_attends_per_)?(layers?|blocks?)$", lambda v, r, f: r.layers),
    (r"codebook_size", _at_most(32)),
    (r"num_codebooks|num_filters", _at_most(2)),
    (r"kernel_size", _kernel),
    (
        r"^num_(encoder|decoder|transformer|text|block|mtp|nextn_predict)_?layers$|^depth$",
        lambda v, r, f: min(v, r.layers),
    ),
    (r"n_group$|num_expert_groups?$", lambda v, r, f: min(v, 3)),
    (r"topk_group", _at_most(2)),
    (r"experts_per_tok|top_?k(_experts)?$|num_selected_experts|moe_k$|moe_topk|expert_top_k", _at_most(3)),
    (r"shared_experts?$", _at_most(2)),
    (r"(num|n|moe_num)_(\w+_)?experts$|zero_expert_num|num_experts", _experts),
    (r"qk_nope_head_dim", lambda v, r, f: _NOPE_DIM),
    (r"qk_rope_head_dim|^rotary_dim$|rope_head_dim", _rope_dim),
    (r"qk_head_dim", _whole_head),
    (r"^v_head_dim$", lambda v, r, f: 12),
    (r"true_hidden_size|intra_bottleneck_size", lambda v, r, f: 32),
    (r"chunk_(left|right)_context", _at_most(4)),
    (r"adapter_(in|out)(put)?_(dim|size)|audio_hidden", lambda v, r, f: r.hidden),
    (r"q_lora_rank", lambda v, r, f: 18),
    (r"kv_lora_rank", lambda v, r, f: 10),
    (r"lora_rank|lowrank|_rank$|lora_r$|low_rank", _at_most(5)),
    (r"index_n_heads|indexer_n_heads|index_num_heads", _at_most(3)),
    (r"indexer?_head_dim", lambda v, r, f: r.head_dim),
    (r"index_topk|indexer?_budget|index_block_size|index_\w+_blocks", _at_most(8)),
    (r"linear_num_key_heads", lambda v, r, f: 2),
    (r"linear_num_value_heads", lambda v, r, f: 4),
    (r"linear_(key_)?head_dim", lambda v, r, f: 8),
    (r"linear_value_head_dim", lambda v, r, f: 12),
    (r"mamba_(n_|num_)?heads|^mamba_n_heads", lambda v, r, f: 2 * r.hidden // 16),
    (r"mamba_d_head|mamba_head_?dim", lambda v, r, f: 16),
    (r"mamba_d_ssm", lambda v, r, f: 2 * r.hidden),
    (r"mamba_n_?groups|mamba_num_groups|^n_groups$", _at_most(2)),
    (r"state_size|d_state|ssm_state", _at_most(8)),
    (r"dt_rank|time_step_rank", _at_most(3)),
    (r"chunk_size(?!_feed)|attn_chunk_length|mamba_chunk", _at_most(4)),
    (r"(num_|n_)?(key_value|kv|multi_query)_?(heads|groups)|num_query_groups|num_kv_heads", _kv_heads),
    (r"head_dim$|^d_kv$|^d_head$|dim_head$|head_size$|kv_channels|mamba_headdim", _head_dim),
    (r"heads?$|heads_per_layer", lambda v, r, f: r.heads),
    (
        r"intermediate_size|ffn_(hidden_)?(size|dim)|feed_?forward_(size|dim)|d_ff|^n_inner|ffn_dim|inner_dim|^dim_ff$"
        r"|ffn_hidden|mlp_size|d_inner|filter_size",
        lambda v, r, f: r.inner,
    ),
    (
        r"hidden_?size|^d_model$|^n_embd$|^embed_dim$|^dim$|hidden_dim|embedding_dim|^emb_dim$|model_dim|embedding_size"
        r"|^width$|lru_width|embed_proj_dim|d_embed|hidden_states_dim|attention_hidden|d_latents|output_dim",
        _hidden,
    ),
    (r"original_max_position", lambda v, r, f: ORIGINAL_LENGTH),
    (
        r"max_\w*position|n_positions|n_ctx|max_seq_len|max_sequence|context_length|max_\w*source_positions"
        r"|max_\w*target_positions|seq_length|^max_length$",
        lambda v, r, f: min(v, LENGTH),
    ),
    (r"window|local_radius|attention_chunk|block_length|block_size|mem_len", _at_most(WINDOW)),
    (r"type_vocab|type_size", _at_most(3)),
    (r"(_|^)(freq|interval|period|pattern|every_n_layers)$", _at_most(2)),
    (r"num_kv_shared_layers", lambda v, r, f: 0),
    (r"num_sparse_\w*layers", _at_most(1)),
    (r"sparse_step", _at_most(2)),
    (r"first_k_dense|max_window_layers|offset$|num_dense_layers", _at_most(1)),
    (r"num_buckets", _at_most(32)),
    (r"max_distance", _at_most(20)),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)
TOKEN = re.compile(r"_token_ids?$|_token_index$|token_id$|_idx$|_start_id$|_ids?$")
"""Fields that name a token, or several."""
LARGE, SHRUNK = 64, 24
"""What a size of unknown meaning above the one is shrunk to."""


def shrink_int(name: str, value: int, recipe: Recipe, fields: Fields) -> int:
    """A size, by the first rule whose pattern is in its name; an unknown one only where it is large."""
    if value <= 0:
        return value
    for pattern, rule in _COMPILED:
        if pattern.search(name):
            return int(rule(value, recipe, fields))
    return SHRUNK if value > LARGE else value


def shrink_float(name: str, value: float) -> float:
    """An epsilon gets a size that shows; everything else stays."""
    return 1e-3 if re.search(r"(^|_)eps(ilon)?$", name) and 0 < value < 1e-3 else value
