"""Layers of any model type with a mistake: the reference's class, in which a function of its module is another.

The functions are written for the purpose, so that a cause is not recognised by the code that looks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parity.tiny import models


def strayed(reference: str, change: Callable[[Any], dict[str, Any]]) -> type[nn.Module]:
    """A class like that of `model_type:Class`, in whose forward some functions of its module are others.

    Args:
        change: gives them by name; it gets the module of transformers.
    """
    model_type, _, name = reference.partition(":")
    cls = getattr(models.modeling(model_type), name)
    space = sys.modules[cls.__module__]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patch.multiple(space, **change(space)):
            return cls.forward(self, *args, **kwargs)

    return type(f"Strayed{name}", (cls,), {"forward": forward})


def tiled(space: Any) -> dict[str, Any]:
    """Head i reads key/value head i % kv_heads."""

    def repeat(x: Tensor, count: int) -> Tensor:
        return x[:, torch.arange(x.shape[1] * count) % x.shape[1]]

    return {"repeat_kv": repeat}


def rotated(pairs: Callable[[int], Tensor], sign: float = 1.0, queries: bool = True) -> Callable[[Any], dict[str, Any]]:
    """Rotation by complex numbers, made of the channels that turn together: [pairs, 2] of so many channels."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor) -> Tensor:
        width = cos.shape[-1]
        couples = pairs(width)
        x = x.clone()
        z = torch.complex(x[..., couples[:, 0]], x[..., couples[:, 1]])
        z = z * torch.complex(cos[:, None, :, first], sign * sin[:, None, :, first])
        x[..., couples[:, 0]], x[..., couples[:, 1]] = z.real, z.imag
        return x

    def change(space: Any) -> dict[str, Any]:
        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
            half = cos.shape[-1] // 2
            laid_out_in_pairs = half > 1 and bool((cos[..., ::2] == cos[..., 1::2]).all())
            first = torch.arange(0, 2 * half, 2) if laid_out_in_pairs else torch.arange(half)
            return turn(q, cos, sin, first) if queries else q, turn(k, cos, sin, first)

        return {"apply_rotary_pos_emb": apply}

    return change


def adjacent(width: int) -> Tensor:
    return torch.arange(width).view(-1, 2)


def halves(width: int) -> Tensor:
    return torch.arange(width).view(2, -1).mT


def attending(
    scale: Callable[[float, Tensor], float] = lambda scale, q: scale,
    see: Callable[[Tensor], Tensor] = lambda seen: seen,
) -> Callable[[Any], dict[str, Any]]:
    """Attention by hand.

    Args:
        scale: gets the reference's scale and the queries.
        see: gets the reference's mask, True = may attend, [rows or 1, 1, queries, keys].
    """

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale(scaling, query)
        if named.get("softcap"):
            scores = named["softcap"] * (scores / named["softcap"]).tanh()
        if attention_mask is not None:
            seen = see(attention_mask == 0 if attention_mask.is_floating_point() else attention_mask)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), value), None

    return lambda space: {"eager_attention_forward": attention}


def up_to(diagonal: int) -> Callable[[Tensor], Tensor]:
    """Of a mask without windows: every query sees keys up to so many after its own."""

    def see(seen: Tensor) -> Tensor:
        queries, keys = seen.shape[-2:]
        valid = seen.any(-2, keepdim=True)
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + diagonal) & valid

    return see


Tables = tuple[Tensor, Tensor]


def placed(reference: str, tables: Callable[[Tables, int, int, Callable[[Tensor], Tables]], Tables]) -> type[nn.Module]:
    """A class like an attention of the reference which makes rotary tables of its own.

    Args:
        tables: gets those given, the number of tokens before and in the call, and what makes tables of positions.
    """
    model_type, _, name = reference.partition(":")
    cls = getattr(models.modeling(model_type), name)

    class Placed(cls):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
            self.register_buffer("inv_freq", config.rope_parameters["rope_theta"] ** -exponents, persistent=False)

        def forward(self, hidden_states: Tensor, position_embeddings: Tables, *rest: Any, **named: Any) -> Any:
            cache = next((value for value in named.values() if hasattr(value, "get_seq_length")), None)
            seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)

            def of(positions: Tensor) -> Tables:
                angles = (positions[..., None] * self.inv_freq).repeat(1, 1, 2)
                return angles.cos(), angles.sin()

            own = tables(position_embeddings, seen, hidden_states.shape[1], of)
            return super().forward(hidden_states, own, *rest, **named)

    return Placed


def one_further(given: Tables, seen: int, new: int, of: Callable[[Tensor], Tables]) -> Tables:
    (cos, sin), (by, rise) = given, of(torch.ones(1, 1))
    return cos * by - sin * rise, sin * by + cos * rise


def from_zero_again(given: Tables, seen: int, new: int, of: Callable[[Tensor], Tables]) -> Tables:
    return of(torch.arange(new)[None]) if seen else given


def by_length(given: Tables, seen: int, new: int, of: Callable[[Tensor], Tables]) -> Tables:
    return of(torch.arange(seen, seen + new)[None])
