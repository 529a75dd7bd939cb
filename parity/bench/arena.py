"""Both sides of a layer with the same weights, inputs and cache contents, ready to be called as a model calls them.

A model gives its layers no more of a mask than they need: ours get a marker, the reference's fused attention none at
all. A cache is filled anew before every look at the clock, so that each begins at the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from parity import routing
from parity.bench import realistic
from parity.bench.contest import Call, Contestant
from parity.candidate import Candidate
from parity.case import Case
from parity.compare import Quantity, Record
from parity.family import Kind
from parity.oracle import lifted
from parity.pair import Pair, Side, input_of, tables_of, tabulate
from parity.reference import Reference
from parity.scenario import Scenario
from reimpl.cache import Cache, LatentCache
from reimpl.mask import CAUSAL

SEED = 0
STEPS = 16
"""So many tokens at most are decoded in a row; caches have room for them."""

LARGEST_COPY = 2**32
"""Bytes. `batched_mm` copies the weights of each token's experts, which is for few tokens only."""

OURS, EAGER = "ours", "eager"


class Arena:
    """One layer in one dtype, with weights, doing one piece of work after the other."""

    def __init__(self, pair: Pair, dtype: torch.dtype) -> None:
        self.pair, self.dtype = pair, dtype
        self.ours, self.theirs, self.truth = pair.candidate(dtype), pair.reference(dtype), pair.reference(torch.float64)
        weights = realistic.weights(self.theirs, SEED)
        for side in (self.ours, self.theirs, self.truth):
            pair.load(side, weights, SEED)
        _share(self.ours, self.theirs)

    def enter(self, tokens: int, cached: int, rows: int) -> Bout:
        """Begin a piece of work: so many tokens after so many that are cached, in so many rows."""
        memory = (cached or tokens) if self.pair.layer.must_remember else 0
        before = 0 if self.pair.layer.kind is Kind.CROSS else cached
        case = self.pair.case(Scenario(schedule=(tokens,), batch=rows, offset=before, memory=memory, seed=SEED))
        tabulate(self.pair, case, self.dtype)
        tabulate(self.pair, case, torch.float64)
        return Bout(self, case, cached)


class Bout:
    """A piece of work, and the ways to do it."""

    def __init__(self, arena: Arena, case: Case, cached: int) -> None:
        self.arena, self.case, self.cached = arena, case, cached
        self.tokens, self.grows = case.scenario.length, bool(cached) and arena.pair.layer.kind is not Kind.CROSS

    @cached_property
    def contestants(self) -> list[Contestant]:
        """Ours, then the reference in each of its implementations."""
        most = STEPS if self.grows else 1 if self.case.cached and not self.cached else 1000
        ours = Contestant(OURS, partial(self.prepare, self.arena.ours), most)
        theirs = (Contestant(_name(way), partial(self.prepare, self.arena.theirs, way), most) for way in self._ways)
        return [ours, *theirs]

    @cached_property
    def _ways(self) -> Sequence[Mapping[str, str]]:
        return [way for way in self.arena.pair.implementations_of(self.arena.theirs) if self._affordable(way)]

    def _affordable(self, way: Mapping[str, str]) -> bool:
        if way.get("_experts_implementation") != "batched_mm":
            return True
        experts = [weight for weight in self.arena.theirs.parameters.values() if weight.ndim == 3]
        copied = sum(weight[0].numel() * weight.element_size() for weight in experts)
        return self.tokens * self.arena.theirs.config.num_experts_per_tok * copied <= LARGEST_COPY

    def prepare(self, side: Side, way: Mapping[str, str] | None = None) -> Call:
        """One call of a side's module, with a cache of its own."""
        if way is not None and isinstance(side, Reference):
            side.use(way)
        args, named = self._arguments(side, self.filled(side))
        return partial(side.module, *args, **named)

    def _arguments(self, side: Side, cache: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        case = self.case
        args, named = side.arguments(case, case.steps[0], input_of(side, case), tables_of(side, case), cache)
        causal = case.causal and case.layer.kind is Kind.ATTENTION
        if isinstance(side, Candidate):
            return args, named | ({"mask": CAUSAL if causal else None} if "mask" in named else {})
        eager = getattr(side.config, "_attn_implementation", EAGER) == EAGER
        if not (eager and causal and self.tokens > 1):
            named |= {name: None for name in named if name.endswith("attention_mask")}
        return args, named

    def filled(self, side: Side) -> Any:
        """A cache as it is when the work begins."""
        if not self.case.cached:
            return None
        cache: Any = side.new_cache()
        if self.grows:
            keys, values = (tensor.to(side.dtype) for tensor in self.contents)
            if isinstance(side, Candidate):
                _fill(cache, keys, values)
            else:
                cache.update(keys, values, self.case.layer.index)
        elif self.cached:
            args, named = self._arguments(side, cache)
            side.module(*args, **named)
        return cache

    @cached_property
    def contents(self) -> list[Tensor]:
        """Keys and values of the cached tokens, in the shapes that the reference caches."""
        side = self.arena.theirs
        cache = side.new_cache()
        args, named = self._arguments(side, cache)
        side.module(*args, **named)
        generator = torch.Generator().manual_seed(SEED)
        shapes = [(*tensor.shape[:2], self.cached, tensor.shape[-1]) for _, tensor in side.cache_contents(cache)]
        return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]

    def error(self) -> float:
        """Our largest error against the truth, in units of the eager reference's; all choose the same experts."""
        ours = self._record(self.arena.ours, None)
        told = routing.agreed(ours, self._record(self.arena.theirs, self._ways[0]))
        eager = self._record(self.arena.theirs, self._ways[0], told)
        with lifted():
            truth = self._record(self.arena.truth, self._ways[0], told)
        mine, yard = (_largest_error(record, truth) for record in (ours, eager))
        return mine / yard if mine else 0.0

    def _record(self, side: Side, way: Mapping[str, str] | None, told: routing.Told | None = None) -> Record:
        call = self.prepare(side, way)

        def run() -> Record:
            values = side.output(call())
            return Record([Quantity(name, "output") for name in values], list(values.values()), [None] * len(values))

        return routing.watched(run, {} if told is None else told)

    @property
    def numbers(self) -> int:
        """So many numbers are cached for a token, going by what the reference caches."""
        return sum(tensor.shape[1] * tensor.shape[-1] for tensor in self.contents)

    def spare(self) -> int:
        """Bytes that our growing cache holds after a step beyond what its capacity needs."""
        cache = self.filled(self.arena.ours)
        args, named = self._arguments(self.arena.ours, cache)
        self.arena.ours.module(*args, **named)
        needed = self.case.scenario.batch * cache[0].capacity * self.numbers * self.arena.dtype.itemsize
        return sum(tensor.untyped_storage().nbytes() for tensor in cache[0].held) - needed


def _share(ours: Side, theirs: Side) -> None:
    """Let both sides read the same memory, so that neither finds its weights in the processor's cache more often."""
    for name, parameter in ours.parameters.items():
        other = theirs.parameters.get(name)
        if other is not None and torch.equal(parameter, other):
            parameter.data = other.data


def _fill(cache: Cache, keys: Tensor, values: Tensor) -> None:
    """The last token by itself, as when it was decoded: with it the cache moves to storage of its capacity."""
    own: Any = cache[0]
    if isinstance(own, LatentCache):
        keys, values = keys[:, 0], values[:, 0]
    own.capacity = keys.shape[-2] + STEPS
    own.append(keys[..., :-1, :], values[..., :-1, :])
    own.append(keys[..., -1:, :], values[..., -1:, :])


def _name(way: Mapping[str, str]) -> str:
    """What an implementation of the reference is called."""
    return "+".join(dict.fromkeys(way.values())) or "reference"


def _largest_error(record: Record, truth: Record) -> float:
    return max(
        float((value.double() - true).abs().max()) for value, true in zip(record.values, truth.values, strict=True)
    )
