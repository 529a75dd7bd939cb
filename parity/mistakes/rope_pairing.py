"""Which channels turn together, and which way: conventions with equal shapes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, GROUPED, LATENT, ROTARY, TABLES
from parity.mistakes.seams import (
    Function,
    built,
    configured,
    exchanged,
    loaded_each,
    rotating,
    several,
    turning,
    wrapped,
)
from reimpl import rope
from reimpl.attention import Attention
from reimpl.cache import LatentCache
from reimpl.latent_attention import LatentAttention
from reimpl.rope import adjacent_from_half, half_from_adjacent, rotate

KIND = "rope pairing"
ROTATED = ("q after rotation", "k after rotation")
K_ROTATED = ("k after rotation",)
TWO_TOKENS = "more than one position"
TURNING = (Place((*GROUPED, *LATENT), ATTENDING, "b1 s2", "b1 s1"),)
QUERIES_AND_KEYS = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


def adjacent(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing="half": rotate(x, cos, sin, "adjacent")


def turn_back(rotate: Function) -> Function:
    """Rotates by the negative angle."""
    return lambda x, cos, sin, pairing="half": rotate(x, cos, -sin, pairing)


def sines_for_cosines(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing="half": rotate(x, sin, cos, pairing)


def turn_half_of_the_channels(rotate: Function) -> Function:
    def call(x: Tensor, cos: Tensor, sin: Tensor, pairing: Any = "half") -> Tensor:
        pairs = max(1, cos.shape[-1] // 4)
        cos, sin = (torch.cat((table[..., :pairs], table[..., :pairs]), -1) for table in (cos, sin))
        return rotate(x, cos, sin, pairing)

    return call


def forget_the_minus(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((b, a), -1) * sin


def back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, -sin)


def leave(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


def turn_v_too(forward: Function) -> Function:
    def call(self: Any, x: Tensor, rotary: Any = None, mask: Any = None, cache: Any = None) -> Tensor:
        project = self.project

        def turned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = project(x)
            return q, k, rotate(v, *rotary)

        with patch.object(self, "project", turned):
            return forward(self, x, rotary, mask, cache)

    return call


def pair_q_only(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(self.paired(q), cos, sin), rotate(k[:, None], cos, sin)[:, 0]


def store_adjacent(append: Function) -> Function:
    """The rotated key lies in the cache as adjacent pairs, and is read as what it is."""

    def call(self: Any, latents: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        halves = keys.unflatten(-1, (2, -1)).mT.flatten(-2)
        latents, held = append(self, latents, halves)
        return latents, held.unflatten(-1, (-1, 2)).mT.flatten(-2)

    return call


def permute_by_query_heads(k: Tensor, config: Any) -> Tensor:
    """Rows of k permuted as though it had as many heads as q, and back as it has."""
    width = config.head_dim * config.num_key_value_heads // config.num_attention_heads
    return k if width % 2 else half_from_adjacent(adjacent_from_half(k, width), config.head_dim)


MISTAKES = (
    Mistake(
        "rotates adjacent pairs where the reference rotates halves",
        rotating(adjacent),
        TURNING,
        ROTATED,
        TWO_TOKENS,
        source="huggingface/transformers#25199",
        remedy="weights |= {name: adjacent_from_half(rows, head_dim) for name, rows in weights.items()"
        " if 'q_proj' in name or 'k_proj' in name}",
    ),
    Mistake(
        "permutes q and k for adjacent pairs, and rotates halves",
        several(*(loaded_each(name, lambda w, c: adjacent_from_half(w, c.head_dim)) for name in QUERIES_AND_KEYS)),
        (Place(GROUPED, ATTENDING, "b1 s2"),),
        ("q", "k", *ROTATED, "q_norm", "k_norm"),
        "any cache: keys lie in another order; in outputs, more than one position",
        source="huggingface/transformers#25199",
        remedy="weights |= {name: half_from_adjacent(rows, head_dim) for name, rows in weights.items()"
        " if 'q_proj' in name or 'k_proj' in name}",
    ),
    Mistake("rotates the wrong way", rotating(turn_back), TURNING, ROTATED, TWO_TOKENS),
    Mistake("rotates k the wrong way, and q the right way", turning(k=back), TURNING, K_ROTATED, TWO_TOKENS),
    Mistake("leaves k unrotated", turning(k=leave), TURNING, K_ROTATED, TWO_TOKENS),
    Mistake("leaves q unrotated", turning(q=leave), TURNING, ("q after rotation", "scores"), TWO_TOKENS),
    Mistake(
        "takes sines for cosines",
        rotating(sines_for_cosines),
        (Place((*GROUPED, *LATENT), ATTENDING, "b1 s2"),),
        ROTATED,
        "any cache: keys turn by another angle, even the first; in outputs, more than one position",
    ),
    Mistake(
        "adds the turned half where it should be subtracted",
        exchanged(rope, "_rotate_half", forget_the_minus),
        TURNING,
        ROTATED,
        TWO_TOKENS,
    ),
    Mistake(
        "rotates half of each head where the reference rotates all of it",
        rotating(turn_half_of_the_channels),
        TURNING,
        ROTATED,
        TWO_TOKENS,
        source="vllm-project/vllm#30384",
    ),
    Mistake(
        "rotates v too",
        wrapped(Attention, "forward", turn_v_too),
        (Place(GROUPED, ATTENDING, "b1 s2", "b1 s1"),),
        ("cached v", "context"),
        TWO_TOKENS,
    ),
    Mistake(
        "permutes the rows of k with the number of query heads",
        several(*(loaded_each(f"k_proj.{name}", permute_by_query_heads) for name in ("weight", "bias"))),
        (Place(GROUPED, ATTENDING, "h8/4 d8 b1 s2", "h4/4 d8 b1 s4"),),
        ("k", "k_norm", "k after rotation"),
        "fewer key/value heads than heads, and a head wide enough for the two orders to differ",
        source="ggml-org/llama.cpp#3364",
    ),
    Mistake(
        "lays the tables out for adjacent pairs, and rotates halves",
        wrapped(rope, "_tables", lambda tables: lambda given: tables(given).unflatten(-1, (2, -1)).mT.flatten()),
        (Place(ROTARY, TABLES, "b1 s2", "b1 s1"),),
        ("cos",),
        "a position after the first, and more than one pair",
    ),
    Mistake(
        "ignores rope_interleave, and takes it for set",
        configured(lambda fields: {"rope_interleave": True}),
        (Place(LATENT, ATTENDING, "interleave=no b1 s2", "b1 s4"),),
        (*ROTATED, "kv_a_proj_with_mqa"),
        "a model whose rotated channels are stored as halves",
        source="huggingface/nanotron#427",
    ),
    Mistake(
        "takes rotated channels for halves that are stored as adjacent pairs",
        built(LatentAttention, lambda layer: setattr(layer, "pairing", "half")),
        (Place(LATENT, ATTENDING, "b1 s2", "interleave=no b1 s4"),),
        (*ROTATED, "kv_a_proj_with_mqa"),
        "a model whose rotated channels are stored as adjacent pairs, as all published ones are",
        source="huggingface/nanotron#427",
    ),
    Mistake(
        "brings the adjacent pairs of q together, and leaves those of k",
        exchanged(LatentAttention, "turn", pair_q_only),
        (Place(LATENT, ATTENDING, "b1 s2", "interleave=no b1 s4"),),
        K_ROTATED,
        "rotated channels that are stored as adjacent pairs",
    ),
    Mistake(
        "caches the rotated key in adjacent pairs",
        wrapped(LatentCache, "append", store_adjacent),
        (Place(LATENT, ATTENDING, "b1 s2"),),
        ("cached v",),
        "any cache that is looked into: no output shows it",
        verdicts=("cache",),
    ),
)
