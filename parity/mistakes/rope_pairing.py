"""Which channels turn together, and which way: two conventions with equal shapes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, GROUPED
from parity.mistakes.seams import Function, exchanged, loaded_each, rotating, several, wrapped
from reimpl.attention import Attention
from reimpl.rope import adjacent_from_half, half_from_adjacent, rotate

KIND = "rope pairing"
ROTATED = ("q after rotation", "k after rotation")
ONE_TOKEN = "b1 s1"
TWO_TOKENS = "more than one position"


def adjacent(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing="half": rotate(x, cos, sin, "adjacent")


def turn_back(rotate: Function) -> Function:
    """Rotates by the negative angle."""
    return lambda x, cos, sin, pairing="half": rotate(x, cos, -sin, pairing)


def turn_k_back(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, -sin)


def turn_q_only(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), k


def turn_v_too(forward: Function) -> Function:
    def call(self: Any, x: Tensor, rotary: Any = None, mask: Any = None, cache: Any = None) -> Tensor:
        project = self.project

        def turned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = project(x)
            return q, k, rotate(v, *rotary)

        with patch.object(self, "project", turned):
            return forward(self, x, rotary, mask, cache)

    return call


def permute_by_query_heads(k: Tensor, config: Any) -> Tensor:
    """Rows of k permuted as though it had as many heads as q, and back as it has."""
    width = config.head_dim * config.num_key_value_heads // config.num_attention_heads
    return k if width % 2 else half_from_adjacent(adjacent_from_half(k, width), config.head_dim)


MISTAKES = (
    Mistake(
        "rotates adjacent pairs where the reference rotates halves",
        rotating(adjacent),
        (Place(GROUPED, ATTENDING, "b1 s2", ONE_TOKEN),),
        ROTATED,
        TWO_TOKENS,
        source="huggingface/transformers#25199",
        remedy="for name in ('q_proj', 'k_proj'): weights[f'{name}.weight'] = "
        "adjacent_from_half(weights[f'{name}.weight'], head_dim)",
    ),
    Mistake(
        "rotates the wrong way",
        rotating(turn_back),
        (Place(GROUPED, ATTENDING, "b1 s2", ONE_TOKEN),),
        ROTATED,
        TWO_TOKENS,
    ),
    Mistake(
        "rotates k the wrong way, and q the right way",
        exchanged(Attention, "turn", turn_k_back),
        (Place(GROUPED, ATTENDING, "b1 s2", ONE_TOKEN),),
        ("k after rotation",),
        TWO_TOKENS,
    ),
    Mistake(
        "leaves k unrotated",
        exchanged(Attention, "turn", turn_q_only),
        (Place(GROUPED, ATTENDING, "b1 s2", ONE_TOKEN),),
        ("k after rotation",),
        TWO_TOKENS,
    ),
    Mistake(
        "rotates v too",
        wrapped(Attention, "forward", turn_v_too),
        (Place(GROUPED, ATTENDING, "b1 s2", ONE_TOKEN),),
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
)
