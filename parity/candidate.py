"""The candidate side: a layer of ours, called in the one way that all our layers of a kind are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import Case, Step
from parity.family import Family, Kind, Layer
from parity.reference import Tables, cast
from parity.scenario import AxisValue
from reimpl.attention import IMPLEMENTATIONS
from reimpl.cache import Cache, GrowingCache, SlidingCache
from reimpl.weights import below, slots


class Candidate:
    """One layer of ours under one configuration in one dtype."""

    def __init__(
        self, family: Family, layer: Layer, config: Any, point: Mapping[str, AxisValue], dtype: torch.dtype
    ) -> None:
        self.family, self.layer, self.dtype, self.config = family, layer, dtype, config
        self.module: Any = cast(layer.candidate(config), dtype).eval()
        self.parameters = dict(self.module.named_parameters())
        self.slots, self.place = slots(self.module), layer.at
        self.rules = below(family.rules(config), layer.at)
        if "attend" in point:
            attend_with(self.module, str(point["attend"]))

    def new_cache(self) -> Cache:
        """An empty cache, as the layer wants it."""
        if self.layer.kind is Kind.MODEL:
            return self.module.make_cache()
        window = self.layer.window(self.config)
        return Cache([GrowingCache() if window is None else SlidingCache(window)])

    def rotary_modules(self) -> list[nn.Module]:
        """The modules that make rotary tables, which may remember how far they have been asked."""
        return [module for module in self.module.modules() if "Rotary" in type(module).__name__]

    def __call__(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Cache | None = None
    ) -> dict[str, Tensor]:
        """Run one step on `x`: hidden states, or ids for a whole model; [rows, queries(, width)]."""
        args, named = self.arguments(case, step, x, tables, cache)
        return self.output(self.module(*args, **named))

    def generate(self, ids: Tensor, valid: Tensor | None, new_tokens: int, use_cache: bool, eos: int | None) -> Tensor:
        """Greedy generation, [rows, prompt + at most new_tokens]."""
        return self.module.generate(ids, new_tokens, valid=valid, use_cache=use_cache, eos=eos)

    def output(self, returned: Any) -> dict[str, Tensor]:
        """What a forward returned, by name."""
        if self.layer.kind is Kind.ROTARY:
            return {"cos": returned[0], "sin": returned[1]}
        return {"output": returned}

    def arguments(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Cache | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What our layer's forward is called with in one step."""
        kind, span = self.layer.kind, slice(step.start, step.stop)
        if kind is Kind.POINTWISE:
            return (x,), {}
        if kind is Kind.ROTARY:
            return (x, case.positions[:, span]), {}
        if kind is Kind.MODEL:
            named: dict[str, Any] = {
                "embeddings" if x.is_floating_point() else "ids": x,
                "valid": None if case.valid is None else case.valid[:, : step.stop],
                "positions": None if case.default_positions else case.positions[:, span],
                "cache": cache,
            }
            return (), named
        named = {"mask": case.mask(step), "cache": None if cache is None else cache[0]}
        if tables is not None:
            named["rotary"] = (tables[0][:, span], tables[1][:, span])
        return (x,), named


def attend_with(module: nn.Module, implementation: str) -> None:
    """Exchange the scaled dot product of every attention inside a module."""
    for part in module.modules():
        if hasattr(part, "attend"):
            setattr(part, "attend", IMPLEMENTATIONS[implementation])  # noqa: B010 (a type checker knows no such field)


def cache_contents(cache: Cache) -> list[tuple[str, Tensor]]:
    """What a cache holds, by name: keys and values of every layer, [rows, kv_heads, kept tokens, head_dim]."""
    contents = []
    for index, layer in enumerate(cache):
        if layer.length:
            keys, values = layer.held
            contents += [(f"layer {index} keys", keys), (f"layer {index} values", values)]
    return contents
