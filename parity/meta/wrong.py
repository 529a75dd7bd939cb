"""What our layers compute when a fault is planted: small functions that take the place of right ones, or wrap them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.meta.seams import Fields, Function, exchanged
from reimpl import attention
from reimpl.attention import Attention
from reimpl.rope import adjacent_from_half, half_from_adjacent, rotate

# Rotation


def turn_back(rotate: Function) -> Function:
    """Rotates by the negative angle."""
    return lambda x, cos, sin, pairing: rotate(x, cos, -sin, pairing)


def adjacent(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing: rotate(x, cos, sin, "adjacent")


def same_for_all_rows(rotate: Function) -> Function:
    return lambda x, cos, sin, pairing: rotate(x, cos[:1], sin[:1], pairing)


def turn_q_only(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), k


def turn_k_back(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, -sin)


def detach_k(turn: Function) -> Function:
    def call(self: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
        q, k = turn(self, *args)
        return q, k.detach()

    return call


def turn_v_too(forward: Function) -> Function:
    def call(self: Any, x: Tensor, rotary: Any = None, mask: Any = None, cache: Any = None) -> Tensor:
        def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = Attention.project(self, x)
            return q, k, rotate(v, *rotary)

        with exchanged(self, "project", project):
            return forward(self, x, rotary, mask, cache)

    return call


def permute_by_query_heads(k: Tensor, config: Any) -> Tensor:
    """Rows of k permuted as though it had as many heads as q, and back as it has."""
    width = config.head_dim * config.num_key_value_heads // config.num_attention_heads
    return k if width % 2 else half_from_adjacent(adjacent_from_half(k, width), config.head_dim)


# Frequencies


def halve_exponent(periods: Function) -> Function:
    return lambda base, *rest, **named: periods(base**0.5, *rest, **named)


def scale_nothing(fields: Fields) -> Fields:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": fields["rope_parameters"]["rope_theta"]}}


def multiply_linear(fields: Fields) -> Fields:
    rope = fields["rope_parameters"]
    return {"factor": 1 / rope["factor"]} if rope["rope_type"] == "linear" else {}


def take_longer_length(fields: Fields) -> Fields:
    """The length after the context was extended, where the one before is meant."""
    return {"original_max_position_embeddings": fields["max_position_embeddings"]}


def stay_long(grow: Function) -> Function:
    """Once frequencies have been recomputed for a long prompt, short ones get them, too."""

    def call(self: Any, positions: Tensor) -> Tensor:
        furthest = torch.tensor([[self.longest - 1]])
        return grow(self, positions if self.current is self.initial else torch.cat([positions[:1], furthest], dim=1))

    return call


def count_in_bfloat16(forward: Function) -> Function:
    return lambda self, x, positions: forward(self, x, positions.bfloat16().long())


def count_from_one(forward: Function) -> Function:
    return lambda self, x, positions: forward(self, x, positions + 1)


# Norms


def subtract_mean(forward: Function) -> Function:
    return lambda self, x: forward(self, x - x.mean(-1, keepdim=True))


def add_eps_outside(x: Tensor, eps: float) -> Tensor:
    return 1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def divide_by_n_minus_one(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + eps)


def detach_statistic(inverse_rms: Function) -> Function:
    return lambda x, eps: inverse_rms(x, eps).detach()


def residual_after_norm(forward: Function) -> Function:
    def call(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        normalised = self.input_layernorm(x)
        with exchanged(self.input_layernorm, "forward", lambda x: x):
            return forward(self, normalised, *args, **kwargs)

    return call


def residual_in_place(forward: Function) -> Function:
    return lambda self, x, *args, **kwargs: x.copy_(forward(self, x, *args, **kwargs))


# Attention


def hidden_over_heads(layer: Any) -> float:
    """From the scale by head_dim to that by hidden_size / heads."""
    heads = layer.q_proj.out_features // layer.head_dim
    return (layer.q_proj.in_features / heads) ** -0.5 / layer.scale


def tile(mix: Function) -> Function:
    """Query head h reads key/value head h modulo their number."""

    def call(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return mix(self, q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), mask)

    return call


def merge_channels_first(mix: Function) -> Function:
    def call(self: Any, *args: Any) -> Tensor:
        return mix(self, *args).unflatten(-1, (-1, self.head_dim)).transpose(-1, -2).flatten(-2)

    return call


def mask_weights(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """The weights, which are the contexts of unit vectors, are masked when they are normalised already."""
    units = torch.eye(k.shape[2], dtype=q.dtype).expand(len(k), k.shape[1], -1, -1)
    weights, allowed = attention.eager(q, k, units, None, self.scale), attention._as_tensor(mask, q, k)
    weights = weights if allowed is None else weights.masked_fill(~allowed, 0)
    return (weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)).transpose(1, 2).flatten(2)


def drop(mix: Function) -> Function:
    def call(self: Any, *args: Any) -> Tensor:
        with exchanged(self, "training", True), exchanged(self, "dropout", 0.5):
            return mix(self, *args)

    return call


# Masks, positions, caches


def causal_from_the_top(q_len: int, k_len: int, device: Any = None) -> Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def causal_without_itself(q_len: int, k_len: int, device: Any = None) -> Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len - 1)


def forget_padding_when_decoding(seen: int, valid: Any, **others: Any) -> Fields:
    return {"valid": None} if seen else {}


def decode_from_zero(given: Fields) -> Fields:
    held = given.get("cache")
    if held is None or not held.length or given.get("positions") is not None:
        return {}
    return {"positions": torch.arange(given["ids"].shape[1])[None]}


def newest_first(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return tuple(held.roll(keys.shape[-2], dims=-2) for held in append(self, keys, values))

    return call


def newest_only(append: Function) -> Function:
    def call(self: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        append(self, keys, values)
        return keys, values

    return call


def keys_for_values(append: Function) -> Function:
    return lambda self, keys, values: append(self, values, keys)[::-1]


def once(make_cache: Function) -> Function:
    """Every call gives the cache that the first call made for a model."""
    made: dict[Any, Any] = {}

    def call(self: Any, capacity: int | None = None) -> Any:
        if self not in made:
            made[self] = make_cache(self, capacity)
        return made[self]

    return call
