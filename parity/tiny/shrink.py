"""Tiny configurations of any model type, from the defaults of its configuration class and the names of its fields.

`sizes` knows the fields of the families that we have written. Here nothing is known beforehand: a field is told by the
words of its name, a list with one entry per layer is cut down to one layer of each kind, a nested configuration is
shrunk in its turn. Several recipes are tried, the most lopsided one first, and the first that the class accepts, that
builds and that is small is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import transformers

from parity.tiny.recipes import (
    LENGTH,
    ORIGINAL_LENGTH,
    RECIPES,
    TOKEN,
    VOCABULARY,
    Fields,
    Recipe,
    shrink_float,
    shrink_int,
)

MOST_LAYERS = 8
"""One layer of each kind is kept, but no more than so many."""

OF_EVERY_MODEL = frozenset(transformers.PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
"""Fields that say nothing about a model type."""


class Unshrinkable(ValueError):
    """A model type of which no tiny configuration was found."""


SUPPLIED: Mapping[str, Fields] = {"DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 2.0}}
"""What checkpoints state and a class has no default for."""


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
    """Tiny configurations that the class accepts, the most lopsided first; `changes` are made where such a field is.

    Raises:
        Unshrinkable: if it accepts none, with what it says to the first.
    """
    plain, refused = default(model_type), None
    accepted = False
    for recipe in RECIPES:
        try:
            fields = shrunk(plain, recipe)
            config = rebuilt(plain, fields | {name: each for name, each in (changes or {}).items() if name in fields})
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
    return small | SUPPLIED.get(type(config).__name__, {})


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
    fields |= {name: vars(config)[name] for name in fields if name in vars(config)}
    nested = getattr(config, "sub_configs", {})
    for name in nested:
        value = getattr(config, name, None)
        if isinstance(value, transformers.PreTrainedConfig):
            fields[name] = value
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def kept_layers(fields: Mapping[str, Any], recipe: Recipe) -> list[int]:
    """The layers that are kept: the first of each kind, by all lists that have an entry per layer."""
    count = layer_count(fields)
    if parts := partition(fields, count):
        starts = accumulate([0, *(fields[part] for part in parts[:-1])])
        return [start + layer for start in starts for layer in range(recipe.layers)]
    columns = [value for value in fields.values() if _per_layer(value, count)]
    if not count or not columns:
        return list(range(_stacks(fields, count) or recipe.layers))
    kinds = [repr([column[layer] for column in columns]) for layer in range(count)]
    first = [layer for layer, kind in enumerate(kinds) if kinds[:layer].count(kind) < recipe.of_each_kind][:MOST_LAYERS]
    more = [layer for layer in range(count) if layer not in first][: max(0, recipe.layers - len(first))]
    return sorted(first + more)


def partition(fields: Mapping[str, Any], count: int) -> list[str]:
    """The fields that count the layers of consecutive parts of a model, if it has such."""
    parts = [name for name in fields if re.fullmatch(r"n_\w+_layers", name) and isinstance(fields[name], int)]
    return parts if len(parts) > 1 and sum(fields[name] for name in parts) == count else []


def _stacks(fields: Mapping[str, Any], count: int) -> int:
    """How many stacks of layers there are, where a field tells the layers per stack; 0 where none does."""
    per_stack = [value for name, value in fields.items() if "layers_per_stack" in name and isinstance(value, int)]
    return count // per_stack[0] if per_stack and count % per_stack[0] == 0 else 0


def layer_count(fields: Mapping[str, Any]) -> int:
    """How many layers a configuration has; 0 if it does not tell."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)


def _per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and count > 2 and len(value) == count


def shrink_field(name: str, value: Any, recipe: Recipe, fields: Fields, keep: Sequence[int]) -> Any:
    """One field's tiny value."""
    if name == "hash_seed":
        return 1  # without one every call hashes in another way
    if value is None and recipe.filled:
        return filling(name, recipe, fields)
    if isinstance(value, bool) or value is None:
        return value
    if _per_layer(value, layer_count(fields)):
        if recipe.filled and name == "layer_types" and set(value) == {"linear_attention"}:
            return [*["linear_attention"] * (len(keep) - 1), "full_attention"]
        return [shrink_field(name, value[layer], recipe, fields, keep) for layer in keep if layer < len(value)]
    if isinstance(value, list | tuple):
        return shrink_list(name, list(value), recipe, fields, keep)
    if isinstance(value, dict):
        return shrink_dict(name, value, recipe, fields, keep)
    if isinstance(value, float):
        return shrink_float(name, value)
    if not isinstance(value, int) or TOKEN.search(name):
        return value
    if name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and layer_count(fields) == value:
        return len(keep)
    if "layers_per_stack" in name:
        return 1
    if name in partition(fields, layer_count(fields)):
        return recipe.layers
    return shrink_int(name, value, recipe, fields)


def shrink_list(name: str, value: list[Any], recipe: Recipe, fields: Fields, keep: Sequence[int]) -> list[Any]:
    """A list that names layers keeps those which are left; of another, the entries are shrunk."""
    if value and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        if re.search(r"layer|_idx|_ids$", name) and not re.search("token", name):
            return [keep.index(layer) for layer in value if layer in keep]
        if TOKEN.search(name) or "section" in name:
            return value
        if sum(value) == (fields.get("hidden_size") or fields.get("d_model")):
            part = recipe.hidden // 4
            return [part] * (len(value) - 1) + [recipe.hidden - part * (len(value) - 1)]
        if math.prod(value) == fields.get("max_position_embeddings"):
            return [LENGTH // 8, *[1] * (len(value) - 2), 8]
        return [shrink_int(name, each, recipe, fields) for each in value]
    return deepcopy(value)


def shrink_dict(name: str, value: Mapping[Any, Any], recipe: Recipe, fields: Fields, keep: Sequence[int]) -> Fields:
    """Rotary parameters; what differs in single layers, by their numbers; or sizes by some kind."""
    if "rope" in name:
        return filled_rope(fields) if recipe.filled and not value else shrink_rope(value)
    if value and all(str(key).isdigit() for key in value):
        of_layer = {int(key): each for key, each in value.items()}
        width = len(str(next(iter(value))))
        return {
            str(index).zfill(width): {
                inner: shrink_field(inner, each, recipe, fields, keep) for inner, each in of_layer[layer].items()
            }
            for index, layer in enumerate(keep)
            if layer in of_layer
        }
    small = deepcopy(dict(value))
    return {key: 3 if type(each) is int and each > 8 and "rate" in name else each for key, each in small.items()}


FILLINGS: Sequence[tuple[str, int]] = (
    (r"^head_dim$|^attention_head_dim$", 128),
    (r"^num_key_value_heads$", 8),
    (r"experts_per_tok|moe_topk|top_k_experts", 2),
    (r"^n_routed_experts$", 8),
    (r"^n_shared_experts$", 1),
    (r"^vocab_size$", 1000),
    (r"^indexer_(n_heads|head_dim|budget)$", 128),
    (r"^indexer_kv_heads$", 1),
    (r"^pad_token_id$", 0),
    (r"^indexer_compress_ratio$", 2),
)
"""What fields that are None are given before they are shrunk."""


def filling(name: str, recipe: Recipe, fields: Fields) -> Any:
    """A value for a field that is None, if its name tells one."""
    layers = recipe.layers
    if name == "layer_types":
        return ["conv" if "conv_L_cache" in fields else "linear_attention", *["full_attention"] * (layers - 1)]
    if name == "attn_layer_indices":
        return [layers - 1]
    if name == "default_language":
        return next(iter(fields.get("languages") or [None]))
    for pattern, value in FILLINGS:
        if re.search(pattern, name):
            return shrink_int(name, value, recipe, fields)
    return None


def filled_rope(fields: Fields) -> Fields:
    """Rotary parameters where there are none: for each kind of layer."""
    kinds = dict.fromkeys(fields.get("layer_types") or ())
    return {str(kind): {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds}


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
