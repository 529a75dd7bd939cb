"""What turns the weights of one convention into those of another; the lines that a report tells to paste use these.

All take a weight, [rows, *columns], or a bias, [rows], and give one of the same shape; `rows` are the outputs of a
projection. Of a matrix that is stored [in, out], as GPT-2's are, give the transpose and transpose the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reimpl.rope import adjacent_from_half, half_from_adjacent

__all__ = [
    "adjacent_from_half",
    "alternating_from_halved",
    "block_from_head",
    "first_scaled",
    "half_from_adjacent",
    "halved_from_alternating",
    "head_from_block",
    "of",
    "other_half_first",
    "repeated_from_tiled",
    "swapped",
    "tiled_from_repeated",
]


def of(weights: Mapping[str, Tensor], *modules: str) -> dict[str, Tensor]:
    """Those tensors of a state dict that belong to the modules whose names end so."""
    return {name: tensor for name, tensor in weights.items() if _module(name).endswith(modules)}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def swapped(weights: Mapping[str, Tensor], one: str, other: str) -> dict[str, Tensor]:
    """The tensors of the modules whose names end in one or the other, each under the name of its counterpart.

    Raises:
        KeyError: naming the counterpart that is missing.
    """
    turned = {}
    for here, there in ((one, other), (other, one)):
        for name in of(weights, here):
            module, _, tensor = name.rpartition(".")
            turned[name] = weights[f"{module.removesuffix(here)}{there}.{tensor}"]
    return turned


def block_from_head(rows: Tensor, heads: int, parts: int = 3) -> Tensor:
    """Packed per block, all queries, all keys, all values, from packed per head: its query, its key, its value."""
    return _turned(rows, heads, parts)


def head_from_block(rows: Tensor, heads: int, parts: int = 3) -> Tensor:
    """The inverse of `block_from_head`."""
    return _turned(rows, parts, heads)


def halved_from_alternating(rows: Tensor) -> Tensor:
    """All gates, then all ups, from one that has a gate in every even row and an up in every odd one."""
    return _turned(rows, len(rows) // 2, 2)


def alternating_from_halved(rows: Tensor) -> Tensor:
    """The inverse of `halved_from_alternating`."""
    return _turned(rows, 2, len(rows) // 2)


def other_half_first(rows: Tensor) -> Tensor:
    """The second half of the rows above the first, as where up stands above gate."""
    return _turned(rows, 2, 1).roll(len(rows) // 2, 0)


def first_scaled(rows: Tensor, factor: float, parts: int = 3) -> Tensor:
    """The first of so many packed parts times a factor, as queries are scaled."""
    first, *others = rows.chunk(parts)
    return torch.cat([first * factor, *others])


def tiled_from_repeated(rows: Tensor, head_dim: int, kv_heads: int) -> Tensor:
    """Query heads in the order in which head h reads key/value head h mod kv_heads, from that of h // group."""
    return _turned(rows, kv_heads, len(rows) // head_dim // kv_heads, head_dim)


def repeated_from_tiled(rows: Tensor, head_dim: int, kv_heads: int) -> Tensor:
    """The inverse of `tiled_from_repeated`."""
    return _turned(rows, len(rows) // head_dim // kv_heads, kv_heads, head_dim)


def _turned(rows: Tensor, outer: int, inner: int, *kept: int) -> Tensor:
    """Rows with two of their axes, of these sizes, exchanged.

    Raises:
        ValueError: if they are not so many.
    """
    unit = outer * inner * (kept[0] if kept else 1)
    if unit == 0 or len(rows) % unit:
        raise ValueError(f"{len(rows)} rows are no multiple of {outer} x {inner}{f' x {kept[0]}' if kept else ''}")
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
