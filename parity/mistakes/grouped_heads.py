"""Which query heads read which key/value heads, and how heads are split and joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, BERT, GPT2, GROUPED
from parity.mistakes.seams import Function, exchanged, wrapped
from reimpl.attention import MultiHead

KIND = "grouped heads"
SCORES = ("scores",)
PLACES = (Place(GROUPED, ATTENDING, "b1 s2", "h1/1 b1 s4"), Place((*GPT2, *BERT), ATTENDING, "b1 s2", "heads=1 b1 s4"))


def reading(choose: Function) -> Function:
    """Query head h reads key/value head choose(h, heads, kv_heads)."""

    def wrap(mix: Function) -> Function:
        def call(self: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            heads, kv_heads = q.shape[1], k.shape[1]
            read = choose(torch.arange(heads), heads, kv_heads)
            return mix(self, q, k[:, read], v[:, read], *rest)

        return call

    return wrap


def merge_channels_first(mix: Function) -> Function:
    def call(self: Any, *args: Any) -> Tensor:
        return mix(self, *args).unflatten(-1, (-1, self.head_dim)).transpose(-1, -2).flatten(-2)

    return call


def merge_without_transposing(mix: Function) -> Function:
    """[batch, heads, seq, dim] read as [batch, seq, heads * dim]."""

    def call(self: Any, *args: Any) -> Tensor:
        joined = mix(self, *args)
        return joined.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).reshape(joined.shape)

    return call


def split_channels_first(self: Any, x: Tensor) -> Tensor:
    return x.unflatten(-1, (self.head_dim, -1)).movedim(-1, 1)


MISTAKES = (
    Mistake(
        "tiles key/value heads where the reference repeats each",
        wrapped(MultiHead, "mix", reading(lambda head, heads, kv_heads: head % kv_heads)),
        (Place(GROUPED, ATTENDING, "h6/3 b1 s2", "h4/1 b1 s4"),),
        SCORES,
        "several key/value heads, but fewer than heads",
        source="onnx/onnx#7274",
        remedy="weights['q_proj.weight'] = "
        "weights['q_proj.weight'].unflatten(0, (kv_heads, -1, head_dim)).transpose(0, 1).flatten(0, 2); "
        "weights['o_proj.weight'] = "
        "weights['o_proj.weight'].unflatten(1, (kv_heads, -1, head_dim)).transpose(1, 2).flatten(1)",
    ),
    Mistake(
        "takes the number of key/value heads for the size of a group",
        wrapped(
            MultiHead,
            "mix",
            reading(lambda head, heads, kv_heads: (head // kv_heads).clamp(max=kv_heads - 1)),
        ),
        (Place(GROUPED, ATTENDING, "h6/3 b1 s2", "b1 s4"),),
        SCORES,
        "several key/value heads, and groups of another size",
    ),
    Mistake(
        "lets all heads read the first key/value head",
        wrapped(MultiHead, "mix", reading(lambda head, heads, kv_heads: head * 0)),
        (Place(GROUPED, ATTENDING, "h6/3 b1 s2", "b1 s4"),),
        SCORES,
        "several key/value heads",
    ),
    Mistake(
        "mixes heads and channels when heads are joined",
        wrapped(MultiHead, "mix", merge_channels_first),
        PLACES,
        ("context", "o_proj", "c_proj", "dense"),
        "more than one head",
    ),
    Mistake(
        "mixes heads and tokens when heads are joined",
        wrapped(MultiHead, "mix", merge_without_transposing),
        PLACES,
        ("context", "o_proj", "c_proj", "dense"),
        "more than one head and more than one token",
    ),
    Mistake(
        "mixes heads and channels when heads are split",
        exchanged(MultiHead, "split", split_channels_first),
        PLACES,
        ("q", "k", "q_norm", "q after rotation", "cached k", "scores"),
        "more than one head",
    ),
)
