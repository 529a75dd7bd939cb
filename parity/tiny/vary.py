"""Variations of a tiny configuration, drawn by seed: what fields of such a name can be, wherever they are.

Key-value heads, biases, epsilons, windows, activations, rotary scalings, multipliers, soft caps, and every flag of the
class. A variation that the class refuses, or with which no model builds or runs, is given up field by
field, so that what is left is valid.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from parity.tiny import models, recipes, shrink
from parity.tiny.models import PLAIN, Point

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
EPSILONS = (1e-6, 1e-5, 1e-2)
WINDOWS = (3, 5, 8)
MULTIPLIERS = (0.75, 1.25)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
FIELDS_PER_POINT = 4
NO_VARIATION = re.compile(
    r"use_cache|output_|return_|gradient|init|train|is_decoder|is_encoder|is_training|cross_attention"
)
"""Flags that choose what is returned or how a model is trained, not what a layer computes."""


def points(model_type: str, task: str, count: int, seed: int = 0) -> list[Point]:
    """The plain configuration, then distinct variations that build and run; fewer than `count` if no more are found."""
    found = [PLAIN]
    space = axes(model_type, task)
    for attempt in range(3 * count):
        if len(found) >= count or not space:
            break
        drawn = draw(space, random.Random(f"{seed}:{attempt}:{model_type}"))
        changes = valid(model_type, task, drawn).changes
        if changes not in [point.changes for point in found]:
            found.append(Point(changes, place=len(found)))
    return found


def draw(space: Mapping[str, tuple[Any, ...]], stream: random.Random) -> dict[str, Any]:
    """Some fields and a value for each."""
    names = stream.sample(sorted(space), min(len(space), stream.randint(1, FIELDS_PER_POINT)))
    return {name: stream.choice(space[name]) for name in names}


def valid(model_type: str, task: str, changes: Mapping[str, Any]) -> Point:
    """The changes that can be made together, each tried on top of those before."""
    kept: dict[str, Any] = {}
    for name, value in changes.items():
        if runs(model_type, task, Point((*kept.items(), (name, value)))):
            kept[name] = value
    return Point(tuple(kept.items()))


def runs(model_type: str, task: str, point: Point) -> bool:
    """Whether the class accepts a point, and the model builds and runs."""
    try:
        models.check(models.config(model_type, task, point), task)
    except Exception:
        return False
    return True


@cache
def axes(model_type: str, task: str) -> dict[str, tuple[Any, ...]]:
    """What can vary in a configuration, and the values: of a nested text configuration too, as `text_config.name`."""
    config = models.config(model_type, task)
    text = config.get_text_config()
    inside = {name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is text}
    prefix = f"{inside.pop()}." if inside else ""
    fields = shrink.own_fields(text)
    return {f"{prefix}{name}": values for name, value in fields.items() if (values := choices(name, value, fields))}


def choices(name: str, value: Any, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values that a field can have beside its own; empty if it does not vary."""
    if isinstance(value, bool):
        return () if NO_VARIATION.search(name) else (not value,)
    if re.search(r"(^|_)eps(ilon)?$", name) and isinstance(value, float):
        return EPSILONS
    if re.fullmatch(r"num_key_value_heads|num_kv_heads|n_head_kv|num_key_value_groups", name) and isinstance(
        value, int
    ):
        heads = fields.get("num_attention_heads") or fields.get("n_head") or value
        return tuple(each for each in (1, 2, 3, heads) if heads % each == 0 and each != value)
    if re.search(r"^(sliding_|attention_)?window(_size)?$|^local_attention$", name) and isinstance(value, int):
        return WINDOWS
    if re.search(r"^(hidden_act|hidden_activation|activation_function|activation)$", name) and value in ACTIVATIONS:
        return tuple(each for each in ACTIVATIONS if each != value)
    if re.search(r"multiplier|scaling$|_scale$|routed_scaling_factor", name) and isinstance(value, float) and value > 0:
        return tuple(value * factor for factor in MULTIPLIERS)
    if re.search(r"softcap|soft_cap", name) and isinstance(value, float):
        return (2.0, 5.0)
    if name == "rope_parameters" and isinstance(value, Mapping) and "rope_type" in value:
        return tuple(rope(value, kind, fields) for kind in ROPE_TYPES if kind != value["rope_type"])
    return ()


def rope(plain: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of another type, with thresholds that a short text crosses."""
    kept = {name: plain[name] for name in ("rope_theta", "partial_rotary_factor", "mrope_section") if name in plain}
    scaled = {"rope_type": kind, **kept}
    if kind != "default":
        scaled["factor"] = 4.0
    if kind in ("yarn", "llama3", "longrope"):
        scaled["original_max_position_embeddings"] = recipes.ORIGINAL_LENGTH
    if kind == "llama3":
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        pairs = shrink.rotary_pairs(fields, plain)
        scaled["short_factor"] = [1.0 + 0.25 * pair for pair in range(pairs)]
        scaled["long_factor"] = [2.0 + 0.5 * pair for pair in range(pairs)]
    return scaled
