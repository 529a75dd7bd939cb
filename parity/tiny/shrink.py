"""Tiny configurations of any model type, from the defaults of its configuration class and the names of its fields.

`sizes` knows the fields of the families that we have written. Here nothing is known beforehand: a field is told by the
words of its name, a list with one entry per layer is cut down to one layer of each kind, a nested configuration is
shrunk in its turn. Several recipes are tried, the most lopsided one first, and the first that the class accepts, that
builds and that is small is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import transformers

Fields = dict[str, Any]

VOCABULARY = 101
MOST_LAYERS = 4
"""One layer of each kind is kept, but no more than so many."""
ORIGINAL_LENGTH, LENGTH = 16, 64
WINDOW = 6

OF_EVERY_MODEL = frozenset(transformers.PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
"""Fields that say nothing about a model type."""


class Unshrinkable(ValueError):
    """A model type of which no tiny configuration was found."""


@dataclass(frozen=True)
class Recipe:
    """The sizes that a tiny configuration is given.

    Attributes:
        hidden, inner, heads, kv_heads, head_dim: the axes of attention and feed-forward.
        layers: at least so many.
        overrides: for the fields whose names these patterns match, tried before all others.
    """

    name: str
    hidden: int = 48
    inner: int = 56
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    experts: int = 5
    overrides: Mapping[str, int] = field(default_factory=dict)


RECIPES = (
    Recipe("lopsided"),
    Recipe("powers of two", hidden=64, inner=96, heads=4, experts=8),
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
    return 12 if (fields.get("n_group") or fields.get("num_expert_groups") or 1) > 1 else min(value, recipe.experts)


def _kv_heads(value: int, recipe: Recipe, fields: Fields) -> int:
    """Latent attention has no fewer of them than heads; one of a single head stays."""
    return 1 if value == 1 else recipe.heads if "kv_lora_rank" in fields else recipe.kv_heads


def _head_dim(value: int, recipe: Recipe, fields: Fields) -> int:
    return _ROPE_DIM if "qk_rope_head_dim" in fields else recipe.head_dim


def _whole_head(value: int, recipe: Recipe, fields: Fields) -> int:
    return _ROPE_DIM + _NOPE_DIM


_ROPE_DIM, _NOPE_DIM = 4, 8

RULES: Sequence[tuple[str, Rule]] = (
    (r"^(vision|audio|image|patch|num_mel|fft|hop|sampling|max_source_positions)_?$", lambda v, r, f: v),
    (r"vocab_size|vocabulary|num_embeddings$|^max_2d_position|n_words|ngram_vocab", lambda v, r, f: min(v, VOCABULARY)),
    (r"^(num_|n_)?(hidden_|encoder_|decoder_|self_attends_per_)?(layers?|blocks?)$", lambda v, r, f: r.layers),
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
    (r"qk_rope_head_dim|^rotary_dim$|rope_head_dim", lambda v, r, f: _ROPE_DIM),
    (r"qk_head_dim", _whole_head),
    (r"^v_head_dim$", lambda v, r, f: 12),
    (r"q_lora_rank", lambda v, r, f: 18),
    (r"kv_lora_rank", lambda v, r, f: 10),
    (r"lora_rank|lowrank|_rank$|lora_r$|low_rank", _at_most(5)),
    (r"index_n_heads|indexer_n_heads|index_num_heads", _at_most(3)),
    (r"index_head_dim|indexer_head_dim", _at_most(16)),
    (r"index_topk|index_budget|index_block_size|index_\w+_blocks", _at_most(8)),
    (r"linear_num_key_heads", lambda v, r, f: 2),
    (r"linear_num_value_heads", lambda v, r, f: 4),
    (r"linear_key_head_dim", lambda v, r, f: 8),
    (r"linear_value_head_dim", lambda v, r, f: 12),
    (r"mamba_(n_|num_)?heads|^mamba_n_heads", lambda v, r, f: 2 * r.hidden // 16),
    (r"mamba_d_head|mamba_head_?dim", lambda v, r, f: 16),
    (r"mamba_d_ssm", lambda v, r, f: 2 * r.hidden),
    (r"mamba_n_?groups|mamba_num_groups|^n_groups$", _at_most(2)),
    (r"state_size|d_state|ssm_state", _at_most(8)),
    (r"dt_rank|time_step_rank", _at_most(3)),
    (r"chunk_size(?!_feed)|chunk_length|mamba_chunk", _at_most(4)),
    (r"(num_|n_)?(key_value|kv|multi_query)_?(heads|groups)|num_query_groups|num_kv_heads", _kv_heads),
    (r"heads?$|heads_per_layer", lambda v, r, f: r.heads),
    (r"head_dim$|^d_kv$|head_size$|kv_channels|swa_\w*head_dim|attention_head_size", _head_dim),
    (
        r"intermediate_size|ffn_(hidden_)?(size|dim)|feed_?forward_(size|dim)|d_ff|^n_inner|ffn_dim|inner_dim|^dim_ff$"
        r"|ffn_hidden|mlp_size|d_inner|filter_size",
        lambda v, r, f: r.inner,
    ),
    (
        r"hidden_?size|^d_model$|^n_embd$|^embed_dim$|^dim$|hidden_dim|embedding_dim|^emb_dim$|model_dim|embedding_size"
        r"|^width$|lru_width|embed_proj_dim|d_embed|hidden_states_dim|attention_hidden|d_latents|output_dim",
        lambda v, r, f: r.hidden,
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
    (r"first_k_dense|max_window_layers|offset$|num_dense_layers", _at_most(1)),
    (r"relative_attention_num_buckets|num_buckets", _at_most(8)),
    (r"max_distance", _at_most(20)),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)
TOKEN = re.compile(r"_token_ids?$|_token_index$|token_id$|_idx$|_start_id$|_ids?$")
"""Fields that name a token, or several."""
LARGE, SHRUNK = 64, 24
"""What a size of unknown meaning above the one is shrunk to."""
MOST_PARAMETERS = 3_000_000


def default(model_type: str) -> transformers.PreTrainedConfig:
    """The configuration class's own defaults.

    Raises:
        Unshrinkable: if the class does not accept its own defaults.
    """
    try:
        return transformers.AutoConfig.for_model(model_type)
    except Exception as error:
        raise Unshrinkable(f"{model_type}: its configuration refuses its own defaults: {brief(error)}") from error


def candidates(model_type: str, changes: Mapping[str, Any] | None = None) -> Iterator[tuple[Recipe, Any]]:
    """Tiny configurations that the class accepts, the most lopsided first; `changes` are made to each.

    Raises:
        Unshrinkable: if it accepts none, with what it says to the first.
    """
    plain, refused = default(model_type), None
    accepted = False
    for recipe in RECIPES:
        try:
            config = rebuilt(plain, {**shrunk(plain, recipe), **(changes or {})})
        except Exception as error:
            refused = refused or error
        else:
            accepted = True
            yield recipe, config
    if not accepted:
        raise Unshrinkable(f"{model_type}: no tiny configuration is accepted: {brief(refused)}")


def rebuilt(config: transformers.PreTrainedConfig, fields: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """A configuration of the same class from its fields."""
    return type(config)(**{name: deepcopy(value) for name, value in fields.items() if name != "model_type"})


def shrunk(config: transformers.PreTrainedConfig, recipe: Recipe) -> Fields:
    """The fields of a configuration with every size replaced; only those that its class has beside every model's."""
    known = own_fields(config)
    keep = kept_layers(known, recipe)
    small: Fields = {}
    for name, value in known.items():
        if isinstance(value, transformers.PreTrainedConfig):
            small[name] = rebuilt(value, shrunk(value, recipe))
        else:
            small[name] = shrink_field(name, value, recipe, known, keep)
    _agree(small)
    return small


def changed(config: transformers.PreTrainedConfig, changes: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """A configuration with some fields changed, by the class's own rules; of a nested one as `text_config.name`."""
    fields = own_fields(config)
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        fields[outer] = changed(fields[outer], {inner: value}) if inner else value
    return rebuilt(config, fields)


def own_fields(config: transformers.PreTrainedConfig) -> Fields:
    """The fields that say something about the model type, nested configurations as objects."""
    fields = {name: value for name, value in config.to_dict().items() if name not in OF_EVERY_MODEL}
    fields |= {name: getattr(config, name) for name in fields if hasattr(config, name)}
    nested = getattr(config, "sub_configs", {})
    for name in nested:
        value = getattr(config, name, None)
        if isinstance(value, transformers.PreTrainedConfig):
            fields[name] = value
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def kept_layers(fields: Mapping[str, Any], recipe: Recipe) -> list[int]:
    """The layers that are kept: the first of each kind, by all lists that have an entry per layer."""
    count = layer_count(fields)
    columns = [value for value in fields.values() if _per_layer(value, count)]
    if not count or not columns:
        return list(range(recipe.layers))
    kinds = [repr([column[layer] for column in columns]) for layer in range(count)]
    first = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]][:MOST_LAYERS]
    more = [layer for layer in range(count) if layer not in first][: max(0, recipe.layers - len(first))]
    return sorted(first + more)


def layer_count(fields: Mapping[str, Any]) -> int:
    """How many layers a configuration has; 0 if it does not tell."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)


def _per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and count > 2 and len(value) == count


def shrink_field(name: str, value: Any, recipe: Recipe, fields: Fields, keep: Sequence[int]) -> Any:
    """One field's tiny value."""
    if isinstance(value, bool) or value is None:
        return value
    if _per_layer(value, layer_count(fields)):
        return [shrink_field(name, value[layer], recipe, fields, keep) for layer in keep if layer < len(value)]
    if isinstance(value, list | tuple):
        return shrink_list(name, list(value), recipe, fields, keep)
    if isinstance(value, dict):
        return shrink_rope(value) if "rope" in name else deepcopy(value)
    if isinstance(value, float):
        return shrink_float(name, value)
    if not isinstance(value, int) or TOKEN.search(name):
        return value
    if name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and layer_count(fields) == value:
        return len(keep)
    return shrink_int(name, value, recipe, fields)


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


def shrink_list(name: str, value: list[Any], recipe: Recipe, fields: Fields, keep: Sequence[int]) -> list[Any]:
    """A list that names layers keeps those which are left; of another, the entries are shrunk."""
    if value and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        if re.search(r"layer|_idx|_ids$", name) and not re.search("token", name):
            return [keep.index(layer) for layer in value if layer in keep]
        if TOKEN.search(name) or "section" in name:
            return value
        return [shrink_int(name, each, recipe, fields) for each in value]
    return deepcopy(value)


def shrink_rope(rope: Mapping[str, Any]) -> Fields:
    """Rotary parameters, also one set for each kind of layer: small original lengths, a factor that shows."""
    small: Fields = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = shrink_rope(value)
        elif name == "original_max_position_embeddings":
            small[name] = ORIGINAL_LENGTH
        else:
            small[name] = deepcopy(value)
    return small


def _agree(fields: Fields) -> None:
    """What follows from other fields, in place: tokens inside the vocabulary, factors for as many pairs as turn."""
    vocabulary = fields.get("vocab_size")
    if not isinstance(vocabulary, int):
        vocabulary = VOCABULARY
    last = vocabulary
    for name, value in fields.items():
        if not TOKEN.search(name) or isinstance(value, bool):
            continue
        if isinstance(value, int) and value >= vocabulary:
            last -= 1
            fields[name] = max(last, 3)
        elif isinstance(value, list) and any(isinstance(each, int) and each >= vocabulary for each in value):
            fields[name] = [min(each, vocabulary - 1) for each in value]
    for rope in _ropes(fields.get("rope_parameters")):
        pairs = rotary_pairs(fields, rope)
        for name in ("short_factor", "long_factor"):
            if name in rope:
                step = 0.25 if name == "short_factor" else 0.5
                rope[name] = [1.0 + step * pair for pair in range(pairs)]
        if sections := rope.get("mrope_section"):
            third = pairs // len(sections)
            rope["mrope_section"] = [pairs - third * (len(sections) - 1)] + [third] * (len(sections) - 1)


def _ropes(rope: Any) -> list[Fields]:
    if not isinstance(rope, dict):
        return []
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def rotary_pairs(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """How many pairs of a head's channels turn."""
    head_dim = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    if not head_dim:
        head_dim = (fields.get("hidden_size") or 0) // (fields.get("num_attention_heads") or 1)
    partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    return int(head_dim * partial) // 2


def brief(error: BaseException | None) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
