"""A layer of `reimpl` as a candidate: built from our own configuration, called in our own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parity import family as families
from parity.candidate import cache_contents
from parity.check.adapter import Adapter, Constructed, Recorded
from parity.family import Kind, Layer
from reimpl.cache import Cache, CrossCache, DecoderCache, GrowingCache, LatentCache, LayerCache, SlidingCache
from reimpl.latent_attention import LatentAttention


def is_ours(target: Any) -> bool:
    """Whether something is a layer of `reimpl`, of which a family knows how it is called."""
    return getattr(target, "__module__", "").startswith("reimpl.") and _layer(target) is not None


def _layer(target: type[nn.Module]) -> Layer | None:
    model_type = target.__module__.rpartition(".")[2]
    if model_type not in families.names():
        return None
    return next((each for each in families.load(model_type).layers if each.reference == target.__name__), None)


class Ours(Adapter):
    """Calls a layer of ours with what the reference was called with."""

    lift = False

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        layer = _layer(cls)
        assert layer is not None
        family = families.load(cls.__module__.rpartition(".")[2])
        self.layer = layer
        self.config = family.config.from_dict(constructed.config.to_dict())
        return layer.candidate(self.config)

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        kind = self.layer.kind
        if kind is Kind.POINTWISE:
            return module(recorded.x), None
        if kind is Kind.ROTARY:
            return module(recorded.x, recorded["position_ids"]), None
        if kind is Kind.EMBEDDINGS:
            types = recorded.get("token_type_ids")
            named = {} if types is None else {"token_types": types}
            return module(recorded["input_ids"], recorded["position_ids"], **named), None
        if kind is Kind.MODEL:
            return self._model(module, recorded)
        return self._attention(module, recorded)

    def _model(self, module: Any, recorded: Recorded) -> Any:
        named: dict[str, Any] = {"ids": recorded.get("input_ids"), "positions": recorded.get("position_ids")}
        valid = recorded.get("attention_mask")
        named["valid"] = None if valid is None or bool(valid.all()) else valid.bool()
        if recorded.get("token_type_ids") is not None:
            named["token_types"] = recorded["token_type_ids"]
        cache = None
        if recorded.get("use_cache"):
            named["cache"] = cache = module.make_cache()
            for own, past in zip(cache, recorded.past, strict=False):
                _append(own, past)
        output = module(**named)
        return output, None if cache is None else dict(cache_contents(cache))

    def _attention(self, module: Any, recorded: Recorded) -> Any:
        cache = self._cache(module)
        for past in recorded.past:
            _append(cache, past)
        named: dict[str, Any] = {"cache": cache, "mask": recorded.may_attend}
        if recorded.get("position_embeddings") is not None:
            named["rotary"] = (recorded.cos, recorded.sin)
        output = module(recorded.x, **named)
        return output, dict(cache_contents(Cache([cache]), first=recorded.layer_idx or 0))

    def _cache(self, module: nn.Module) -> Any:
        if any(isinstance(part, LatentAttention) for part in module.modules()):
            return LatentCache()
        window = self.layer.window(self.config)
        return GrowingCache() if window is None else SlidingCache(window)


def _append(cache: LayerCache | Cache, past: tuple[Tensor, Tensor]) -> None:
    if isinstance(cache, DecoderCache):
        cache = cache.own
    keys, values = past
    if isinstance(cache, LatentCache):
        keys, values = keys[:, 0], values[:, 0]
    if not isinstance(cache, CrossCache) and isinstance(cache, LayerCache):
        with torch.no_grad():
            cache.append(keys, values)  # type: ignore[attr-defined]
