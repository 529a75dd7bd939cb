"""The candidate side: a layer of ours, called in the one way that all our layers of a kind are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import OF_MEMORY, Case, Rotary, Step, Tables
from parity.family import Family, Kind, Layer
from parity.scenario import AxisValue
from reimpl.attention import IMPLEMENTATIONS
from reimpl.cache import Cache, CrossCache, DecoderCache, GrowingCache, LatentCache, LayerCache, SlidingCache
from reimpl.latent_attention import LatentAttention
from reimpl.moe import router_logits
from reimpl.precision import convert
from reimpl.state import StateCache
from reimpl.weights import below, slots


class Candidate:
    """One layer of ours under one configuration in one dtype."""

    def __init__(
        self, family: Family, layer: Layer, config: Any, point: Mapping[str, AxisValue], dtype: torch.dtype
    ) -> None:
        self.family, self.layer, self.dtype = family, layer, dtype
        self.config, self.point = config, point
        self.module: Any = convert(layer.candidate(config), dtype).eval()
        self.parameters = dict(self.module.named_parameters())
        self.slots, self.place = slots(self.module), layer.at
        self.rules = below(family.rules(config), layer.at)
        if "attend" in point:
            choose(self.module, "attend", IMPLEMENTATIONS[str(point["attend"])])
        for name in ("form", "dispatch"):
            if name in point:
                choose(self.module, name, point[name])

    def loaded(self) -> None:
        """Nothing of ours remembers the weights it had."""

    def new_cache(self) -> Cache:
        """An empty cache, as the layer wants it."""
        if self.layer.kind is Kind.MODEL:
            return self.module.make_cache()
        return Cache([self._layer_cache()])

    def _layer_cache(self) -> LayerCache | StateCache | Cache:
        if self.layer.recurrent:
            return StateCache()
        if self.layer.kind is Kind.CROSS:
            return CrossCache()
        if hasattr(self.module, "make_cache"):
            return self.module.make_cache()
        if self.family.has_memory(self.layer, self.point):
            return DecoderCache()
        if any(isinstance(part, LatentAttention) for part in self.module.modules()):
            return LatentCache()
        window = self.layer.window(self.config)
        return GrowingCache() if window is None else SlidingCache(window)

    def tokens_in(self, cache: Cache) -> int:
        """How many tokens a cache has seen."""
        return cache.length

    def crop(self, cache: Cache, tokens: int) -> None:
        """Take the last tokens from a cache."""
        cache.crop(cache.length - tokens)

    def reorder(self, cache: Cache, index: Tensor) -> None:
        """Row i of a cache continues what row index[i] was."""
        cache.reorder(index)

    def reset(self, cache: Cache) -> None:
        """Let a cache forget everything."""
        cache.reset()

    def rotary_modules(self) -> list[nn.Module]:
        """The modules that make rotary tables, which may remember how far they have been asked."""
        return [module for module in self.module.modules() if "Rotary" in type(module).__name__]

    def __call__(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Cache | None = None
    ) -> dict[str, Tensor]:
        """Run one step on `x`: hidden states, or ids for a whole model; [rows, queries(, width)]."""
        args, named = self.arguments(case, step, x, tables, cache)
        return self.output(self.module(*args, **named))

    def cache_contents(self, cache: Cache) -> list[tuple[str, Tensor]]:
        """What a cache holds, by name: keys and values of every layer, [rows, kv_heads, kept tokens, head_dim]."""
        return cache_contents(cache, first=self.layer.index)

    def router_logits(self, case: Case) -> tuple[Tensor, ...]:
        """What the routers of a whole model give to all experts, layer by layer, [tokens, experts]."""
        with router_logits(self.module) as logits:
            self(case, Step(0, 0, case.scenario.length), case.ids)
        return tuple(logits)

    def generate(self, case: Case, new_tokens: int, use_cache: bool, eos: int | None) -> Tensor:
        """Greedy generation, [rows, prompt + at most new_tokens]."""
        memory = self._memory(case, case.steps[0])
        return self.module.generate(case.ids, new_tokens, valid=case.valid, use_cache=use_cache, eos=eos, **memory)

    def output(self, returned: Any) -> dict[str, Tensor]:
        """What a forward returned, by name."""
        several = returned if isinstance(returned, tuple) else (returned,)
        return dict(zip(self.layer.kind.results, several, strict=False))

    def arguments(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Cache | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What our layer's forward is called with in one step."""
        kind, span = self.layer.kind, slice(step.start, step.stop)
        if kind in (Kind.POINTWISE, Kind.MIXER, Kind.IMAGE):
            return (x,), {}
        if kind is Kind.RECURRENT:
            valid = {} if case.valid is None else {"valid": case.valid[:, span]}
            return (x,), valid | {"cache": None if cache is None else cache[0]}
        if kind is Kind.ROTARY:
            return (x, case.positions[:, span]), {}
        typed = {} if case.types is None else {"token_types": case.types[:, span]}
        if kind is Kind.EMBEDDINGS:
            return (x, case.positions[:, span]), typed
        if kind is Kind.MODEL:
            return (), self._model(case, step, x, cache) | typed | self._memory(case, step)
        own = None if cache is None else cache[0]
        if kind is Kind.CROSS:
            return (x, case.memories(self.dtype, step)), {"mask": case.memory_mask(step), "cache": own}
        named: dict[str, Any] = {"mask": case.mask(step)} | ({} if own is None else {"cache": own})
        if tables is not None:
            named["rotary" if isinstance(tables, Rotary) else "bias"] = tables.at(step)
        if case.memory is not None:
            named |= {"memory": case.memories(self.dtype, step), "memory_mask": case.memory_mask(step)}
        return (x,), named

    def _model(self, case: Case, step: Step, x: Tensor, cache: Cache | None) -> dict[str, Any]:
        offered = {
            "embeddings" if x.is_floating_point() else "ids": x,
            "valid": None if case.valid is None else case.valid[:, : step.stop],
            "positions": None if case.default_positions else case.positions[:, step.start : step.stop],
            "cache": cache,
        }
        return {name: value for name, value in offered.items() if value is not None}

    def _memory(self, case: Case, step: Step) -> dict[str, Any]:
        """An encoder's memory, as a model is given it; nothing where there is none."""
        if case.memory is None:
            return {}
        return {"memory": case.memories(self.dtype, step), "memory_valid": case.memory_valid}


def choose(module: nn.Module, attribute: str, choice: Any) -> None:
    """Let every part of a module that has a choice, as of its scaled dot product, compute in this way."""
    for part in module.modules():
        if hasattr(part, attribute):
            setattr(part, attribute, choice)


def _layers(cache: Cache) -> Iterator[Any]:
    """The caches of single layers, where one of them may be that of a whole stack."""
    for each in cache:
        if isinstance(each, Cache) and not isinstance(each, DecoderCache):
            yield from _layers(each)
        else:
            yield each


def cache_contents(cache: Cache, first: int = 0) -> list[tuple[str, Tensor]]:
    """What a cache holds, by name, its layers counted from `first`.

    Latents stand for the keys of one head, as in the reference, and rotated keys for its values.
    """
    contents: list[tuple[str, Tensor]] = []
    for index, layer in enumerate(_layers(cache), first):
        if isinstance(layer, StateCache):
            contents += [(f"layer {index} {name}", state) for name, state in layer]
            continue
        parts: tuple[Any, ...] = (layer.own, layer.cross) if isinstance(layer, DecoderCache) else (layer,)
        for part in parts:
            of = OF_MEMORY if isinstance(part, CrossCache) else ""
            if part.length:
                keys, values = part.held
                if isinstance(part, LatentCache):
                    keys, values = keys[:, None], values[:, None]
                contents += [(f"layer {index} {of}keys", keys), (f"layer {index} {of}values", values)]
    return contents
