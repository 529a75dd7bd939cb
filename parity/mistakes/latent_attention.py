"""Latent attention: which rows make what, what is normed, and by how much its scores are sharpened."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, LATENT
from parity.mistakes.seams import Function, built, exchanged, exchanged_in, loaded_each, several, wrapped
from reimpl import deepseek_v3, latent_attention
from reimpl.latent_attention import LatentAttention
from reimpl.rope import Rope, yarn_magnitude

KIND = "latent attention"
SCORES = ("scores",)
TWO_TOKENS = "more than one key: a single weight is 1 whatever its score"


def scaled(key: str = "", power: int = 0) -> Function:
    """A softmax scale that takes its weight from another key of the configuration, or another power of it."""

    def scale(config: Any) -> float:
        rope = Rope(config.rope_parameters, config.qk_rope_head_dim, config.max_position_embeddings)
        weight = rope.fields.get(key)
        return config.qk_head_dim**-0.5 * (yarn_magnitude(rope.extension, weight) ** power if weight else 1.0)

    return scale


def rescaled(channels: Function) -> Function:
    """A softmax scale for another number of channels."""

    def wrap(scale: Function) -> Function:
        return lambda config: scale(config) * (channels(config) / config.qk_head_dim) ** -0.5

    return wrap


def rolled(rows: Tensor, heads: int, first: int) -> Tensor:
    """In each head the first rows come last."""
    return rows.unflatten(0, (heads, -1)).roll(-first, dims=1).flatten(0, 1)


def by_block(rows: Tensor, config: Any) -> Tensor:
    """Rows read as the keys of all heads, then the values of all heads, where each head has both."""
    heads = config.num_attention_heads
    k, v = rows.split((heads * config.qk_nope_head_dim, heads * config.v_head_dim))
    return torch.cat((k.unflatten(0, (heads, -1)), v.unflatten(0, (heads, -1))), dim=1).flatten(0, 1)


def skip(name: str) -> Function:
    """A norm that lets everything pass."""

    def change(layer: Any) -> None:
        if hasattr(layer, name):
            setattr(getattr(layer, name), "forward", lambda x: x)  # noqa: B010 (a type checker knows it as a method)

    return change


def norm_after_the_cache(forward: Function) -> Function:
    """The cache holds latents as they are projected, and they are normed whenever they are read."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        norm = self.kv_a_layernorm.forward

        def late(form: Function) -> Function:
            return lambda q, q_rope, latents, *rest: form(q, q_rope, norm(latents), *rest)

        forms = {name: late(form) for name, form in latent_attention.FORMS.items()}
        with patch.object(self.kv_a_layernorm, "forward", lambda x: x), patch.dict(latent_attention.FORMS, forms):
            return forward(self, *args, **kwargs)

    return call


def without_positions(form: Function) -> Function:
    return lambda q, q_rope, *rest: form(q, q_rope * 0, *rest)


def norm_rotated_key_too(layer: Any) -> None:
    def change(module: Any, args: Any, out: Tensor) -> Tensor:
        latents, key = out.split((layer.kv_rank, layer.rope), dim=-1)
        return torch.cat((latents, key / key.square().mean(-1, keepdim=True).sqrt()), dim=-1)

    layer.kv_a_proj_with_mqa.register_forward_hook(change)


MISTAKES = (
    Mistake(
        "does not sharpen the scores where the context was extended",
        exchanged(deepseek_v3, "softmax_scale", scaled()),
        (Place(LATENT, ATTENDING, "rope=yarn-1-1 b1 s2", "rope=yarn b1 s4"),),
        SCORES,
        "yarn with mscale_all_dim, and more than one token",
        source="mobius#548",
        remedy="weights |= {name: q * mscale**2 for name, q in weights.items() if '.q_b_proj.' in name}",
    ),
    Mistake(
        "sharpens the scores for queries, and not for keys",
        exchanged(deepseek_v3, "softmax_scale", scaled("mscale_all_dim", 1)),
        (Place(LATENT, ATTENDING, "rope=yarn-1-1 b1 s2", "rope=yarn b1 s4"),),
        SCORES,
        "yarn with mscale_all_dim, and more than one token",
    ),
    Mistake(
        "sharpens the scores by mscale for mscale_all_dim",
        exchanged(deepseek_v3, "softmax_scale", scaled("mscale", 2)),
        (Place(LATENT, ATTENDING, "rope=yarn-0.7-1.3 b1 s2", "rope=yarn-1-1 b1 s4"),),
        SCORES,
        "yarn with mscale other than mscale_all_dim, and more than one token",
        source="NVIDIA/Megatron-LM#1429",
    ),
    Mistake(
        "scales by the channels without position alone",
        wrapped(deepseek_v3, "softmax_scale", rescaled(lambda config: config.qk_nope_head_dim)),
        (Place(LATENT, ATTENDING, "b1 s2", "b1 s1"),),
        SCORES,
        TWO_TOKENS,
    ),
    Mistake(
        "scales by the channels of a value",
        wrapped(deepseek_v3, "softmax_scale", rescaled(lambda config: config.v_head_dim)),
        (Place(LATENT, ATTENDING, "b1 s2", "b1 s1"),),
        SCORES,
        TWO_TOKENS,
    ),
    Mistake(
        "takes values before keys out of kv_b",
        loaded_each("kv_b_proj.weight", lambda w, c: rolled(w, c.num_attention_heads, c.v_head_dim)),
        (Place(LATENT, ATTENDING, "b1 s2"),),
        ("kv_b_proj", *SCORES, "context"),
        "any input: the rows of a head are not alike",
        remedy="weights |= {name: w.unflatten(0, (heads, -1)).roll(v_head_dim, 1).flatten(0, 1)"
        " for name, w in weights.items() if 'kv_b_proj' in name}",
    ),
    Mistake(
        "takes the keys of all heads, then the values of all heads, out of kv_b",
        loaded_each("kv_b_proj.weight", by_block),
        (Place(LATENT, ATTENDING, "b1 s2", "heads=1 b1 s4"),),
        ("kv_b_proj", *SCORES, "context"),
        "more than one head",
    ),
    Mistake(
        "takes the channels that turn before those without position out of q",
        several(
            *(
                loaded_each(name, lambda w, c: rolled(w, c.num_attention_heads, c.qk_rope_head_dim))
                for name in ("q_proj.weight", "q_b_proj.weight")
            )
        ),
        (Place(LATENT, ATTENDING, "b1 s2", "b1 s1"),),
        ("q_b_proj", "q after rotation", *SCORES),
        TWO_TOKENS,
        remedy="weights |= {name: w.unflatten(0, (heads, -1)).roll(qk_rope_head_dim, 1).flatten(0, 1)"
        " for name, w in weights.items() if 'q_b_proj' in name}",
    ),
    Mistake(
        "takes the rotated key before the latent out of kv_a",
        several(
            *(
                loaded_each(f"kv_a_proj_with_mqa.{name}", lambda w, c: w.roll(-c.qk_rope_head_dim, 0))
                for name in ("weight", "bias")
            )
        ),
        (Place(LATENT, ATTENDING, "b1 s2"),),
        ("kv_a_proj_with_mqa", "kv_a_layernorm", "k after rotation"),
        "any input: the rows are not alike",
        remedy="weights |= {name: w.roll(qk_rope_head_dim, 0) for name, w in weights.items()"
        " if 'kv_a_proj_with_mqa' in name}",
    ),
    Mistake(
        "does not norm the latent of keys and values",
        built(LatentAttention, skip("kv_a_layernorm")),
        (Place(LATENT, ATTENDING, "b1 s2"),),
        ("kv_a_layernorm",),
        "any input: no latent has a root mean square of 1",
    ),
    Mistake(
        "does not norm the latent of queries",
        built(LatentAttention, skip("q_a_layernorm")),
        (Place(LATENT, ATTENDING, "b1 s2", "ranks=0/10 b1 s4"),),
        ("q_a_layernorm",),
        "queries that have a latent, and more than one token",
    ),
    Mistake(
        "norms the rotated key too",
        built(LatentAttention, norm_rotated_key_too),
        (Place(LATENT, ATTENDING, "b1 s2"),),
        ("k after rotation",),
        "any cache; in outputs, more than one token",
    ),
    Mistake(
        "caches latents before their norm",
        wrapped(LatentAttention, "forward", norm_after_the_cache),
        (Place(LATENT, ATTENDING, "b1 s2"),),
        ("cached k", "kv_a_layernorm"),
        "any cache that is looked into: no output shows it",
        verdicts=("cache",),
    ),
    Mistake(
        "leaves the rotated channels out of the scores",
        exchanged_in(
            latent_attention.FORMS,
            absorbed=without_positions(latent_attention.absorbed),
            expanded=without_positions(latent_attention.expanded),
        ),
        (Place(LATENT, ATTENDING, "form=expanded b1 s2", "b1 s1"),),
        SCORES,
        TWO_TOKENS,
    ),
)
