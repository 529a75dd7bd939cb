"""The tensors of a scenario, drawn once and shared by the truth, the reference and the candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parity.family import Kind, Layer
from parity.scenario import Scenario
from parity.tiny import draw

OF_MEMORY = "cross "
"""What stands in the names of cached keys and values that are a memory's."""


@dataclass(frozen=True)
class Step:
    """One chunk of the schedule: tokens `start` to `stop` of every row."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rotary:
    """Tables of the rotation of all tokens, each [rows, length, rotary width]."""

    cos: Tensor
    sin: Tensor

    def at(self, step: Step) -> tuple[Tensor, Tensor]:
        """Those of a step's queries."""
        return self.cos[:, step.start : step.stop], self.sin[:, step.start : step.stop]


@dataclass(frozen=True)
class Bias:
    """What is added to the scores of all keys, [rows, heads, length, length], or [rows, heads, 1, length]."""

    bias: Tensor

    def at(self, step: Step) -> Tensor:
        """That of a step's queries, for the keys up to its last."""
        queries = slice(None) if self.bias.shape[2] == 1 else slice(step.start, step.stop)
        return self.bias[:, :, queries, : step.stop]


Tables = Rotary | Bias


class Case:
    """Inputs, positions and masks of one scenario.

    Shapes: ids and types [rows, length], x [rows, length, width], or [rows, width, height, columns] of
    images, positions [rows, length], valid [rows, length] or
    None where every token is valid, may_attend [rows or 1, 1, length, length], memory [rows, memory, width] and
    memory_valid [rows, memory], None where there is none. Values are representable in bfloat16 and kept in float64, so
    that every dtype starts from the same numbers.
    """

    DRAWN = ("ids", "types", "x", "positions", "valid", "memory", "memory_valid")  # all have rows

    def __init__(
        self,
        scenario: Scenario,
        layer: Layer,
        width: int,
        vocabulary: int,
        window: int | None = None,
        token_types: int = 0,
    ) -> None:
        self.scenario, self.layer, self.causal = scenario, layer, layer.causal
        self.width, self.vocabulary, self.window, self.token_types = width, vocabulary, window, token_types
        self.tables: dict[torch.dtype, Tables] = {}
        self._casts: dict[tuple[str, torch.dtype], Tensor] = {}

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The chunks, in order."""
        return tuple(self._steps())

    def _steps(self) -> Iterator[Step]:
        start = 0
        for index, size in enumerate(self.scenario.schedule):
            yield Step(index, start, start + size)
            start += size

    @cached_property
    def ids(self) -> Tensor:
        """Token ids."""
        scenario = self.scenario
        return draw.tokens((scenario.rows, scenario.length), self.vocabulary, scenario.seed, "ids")

    @cached_property
    def x(self) -> Tensor:
        """Hidden states, or images, at the scenario's scale."""
        scenario, shape = self.scenario, [self.scenario.length, self.width]
        if self.layer.kind is Kind.IMAGE:
            columns = scenario.columns or scenario.length
            shape = [self.width, scenario.length // columns, columns]
        return self._normal("x", (scenario.rows, *shape), scenario.scale)

    def part(self, x: Tensor, step: Step) -> Tensor:
        """The tokens of one step, of ids or of hidden states; an image is always whole."""
        return x if self.layer.kind is Kind.IMAGE else x[:, step.start : step.stop]

    @cached_property
    def types(self) -> Tensor | None:
        """Token types; None where all tokens are of one."""
        scenario = self.scenario
        if not scenario.typed:
            return None
        return draw.tokens((scenario.rows, scenario.length), self.token_types, scenario.seed, "types")

    @cached_property
    def memory(self) -> Tensor | None:
        """What an encoder left: hidden states, never large, as no norm stands between them and their projection."""
        scenario = self.scenario
        if not scenario.memory:
            return None
        return self._normal("memory", (scenario.rows, scenario.memory, self.width), min(scenario.scale, 1.0))

    @cached_property
    def memory_valid(self) -> Tensor | None:
        """Which tokens of the memory are not padding; None where all are valid."""
        scenario = self.scenario
        if not any(scenario.memory_padding):
            return None
        valid = torch.arange(scenario.memory) < scenario.memory - torch.tensor(scenario.memory_padding)[:, None]
        return valid.repeat(scenario.stack, 1)

    def cotangent(self, output: Tensor) -> Tensor:
        """What an output is multiplied with to get a scalar whose gradient is taken; zero on padded rows."""
        key = (f"cotangent {tuple(output.shape)}", output.dtype)
        if key not in self._casts:
            cotangent = self._normal("cotangent", tuple(output.shape), 1.0)
            if self.valid is not None:
                cotangent = cotangent * by_token(self.valid, output)
            self._casts[key] = cotangent.to(output.dtype)
        return self._casts[key]

    def _normal(self, stream: str, shape: tuple[int, ...], scale: float) -> Tensor:
        return draw.bfloat16(draw.normal(shape, self.scenario.seed, stream) * scale).double()

    @cached_property
    def valid(self) -> Tensor | None:
        """Which tokens are not padding; None where all are valid."""
        scenario = self.scenario
        if not any(scenario.padding):
            return None
        index = torch.arange(scenario.length)
        count = torch.tensor(scenario.padding)[:, None]
        start = scenario.length - count
        if scenario.side != "right":
            start = start.clamp(max=0 if scenario.side == "left" else 1)
        return ~((index >= start) & (index < start + count)).repeat(scenario.stack, 1)

    @cached_property
    def document(self) -> Tensor | None:
        """Which document of a packed row each token belongs to, [length]."""
        if not self.scenario.packing:
            return None
        lengths = torch.tensor(self.scenario.packing)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    @cached_property
    def positions(self) -> Tensor:
        """The position of every token, [rows, length]."""
        scenario = self.scenario
        if scenario.packing:
            row = torch.cat([torch.arange(length) for length in scenario.packing])
        else:
            row = torch.arange(scenario.length)
        if scenario.masked_positions and self.valid is not None:
            return (self.valid.long().cumsum(-1) - 1).clamp(min=0) + scenario.offset
        return (row + scenario.offset).expand(scenario.rows, -1).contiguous()

    @property
    def default_positions(self) -> bool:
        """Whether the positions are those that a model counts by itself."""
        scenario = self.scenario
        return not (scenario.packing or scenario.offset or (scenario.masked_positions and self.valid is not None))

    @cached_property
    def may_attend(self) -> Tensor:
        """Who sees whom, [rows or 1, 1, length, length]. A padded query sees itself: no gap empty-row."""
        length = self.scenario.length
        query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
        allowed = (key <= query) if self.causal else torch.ones(length, length, dtype=torch.bool)
        if self.window is not None:
            allowed = allowed & (key > query - self.window)
        if self.document is not None:
            allowed = allowed & (self.document[:, None] == self.document[None, :])
        allowed = allowed[None, None]
        if self.valid is not None:
            allowed = (allowed & self.valid[:, None, None, :]) | torch.eye(length, dtype=torch.bool)
        return allowed

    def first_key(self, step: Step) -> int:
        """The first token whose key is still cached when a step begins: a sliding cache keeps window - 1 tokens."""
        return 0 if self.window is None else max(0, step.start - self.window + 1)

    def mask(self, step: Step) -> Tensor:
        """Who sees whom in one step, [rows or 1, 1, queries, keys]."""
        return self.may_attend[:, :, step.start : step.stop, self.first_key(step) : step.stop]

    def added_mask(self, step: Step, dtype: torch.dtype) -> Tensor:
        """The same mask as transformers wants it: 0 where a query may attend, the dtype's minimum where not.

        Always given, and never boolean: those are the gaps no-mask and boolean-mask.
        """
        key = ("mask", dtype)
        if key not in self._casts:
            floor = torch.zeros((), dtype=dtype).masked_fill(torch.tensor(True), torch.finfo(dtype).min)
            self._casts[key] = torch.where(self.may_attend, torch.zeros((), dtype=dtype), floor)
        return self._casts[key][:, :, step.start : step.stop, self.first_key(step) : step.stop]

    def memory_mask(self, step: Step) -> Tensor | None:
        """Which tokens of the memory a step's queries see, [rows, 1, queries, memory]; None where all."""
        valid = self.memory_valid
        return None if valid is None else valid[:, None, None].expand(-1, -1, step.stop - step.start, -1)

    def added_memory_mask(self, dtype: torch.dtype) -> Tensor:
        """The same as transformers wants it, [rows or 1, 1, 1, memory]."""
        key = ("memory mask", dtype)
        if key not in self._casts:
            mask = torch.zeros(1, self.scenario.memory, dtype=dtype)
            if self.memory_valid is not None:
                mask = mask.masked_fill(~self.memory_valid, torch.finfo(dtype).min)
            self._casts[key] = mask[:, None, None]
        return self._casts[key]

    def inputs(self, dtype: torch.dtype) -> Tensor:
        """Hidden states in a dtype."""
        return self._cast("x", self.x, dtype)

    def memories(self, dtype: torch.dtype, step: Step | None = None) -> Tensor | None:
        """The memory in a dtype. After the first step it is in the cache, where there is one, and NaN is given."""
        if self.memory is None:
            return None
        if self.cached and step is not None and step.index > 0:
            return self._cast("read memory", torch.full_like(self.memory, torch.nan), dtype)
        return self._cast("memory", self.memory, dtype)

    def _cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self._casts:
            self._casts[name, dtype] = tensor.to(dtype)
        return self._casts[name, dtype]

    def arguments(self) -> dict[str, Tensor]:
        """The tensors that layers have been called with so far, by name; views of them share their version."""
        named = {f"{name} in {dtype}": tensor for (name, dtype), tensor in self._casts.items()}
        for dtype, tables in self.tables.items():
            named |= {f"{name} in {dtype}": table for name, table in vars(tables).items()}
        drawn = {name: vars(self).get(name) for name in (*self.DRAWN, "may_attend")}
        return named | {name: tensor for name, tensor in drawn.items() if tensor is not None}

    def varied(self, **tensors: Tensor | None) -> Case:
        """The same case with some of its tensors exchanged."""
        case = Case(self.scenario, self.layer, self.width, self.vocabulary, self.window, self.token_types)
        vars(case).update({name: vars(self)[name] for name in self.DRAWN if name in vars(self)})
        vars(case).update(tensors)
        return case

    @property
    def cached(self) -> bool:
        """Whether the layer is called with a cache: not for a model's one pass over packed rows (gap packed-cache).

        Nor for one pass of a layer whose reference has none.
        """
        one_pass = len(self.steps) == 1
        packed = self.layer.kind is Kind.MODEL and self.scenario.packing and one_pass
        return self.layer.kind.attends and self.causal and not packed and (self.layer.caches or not one_pass)


def by_token(tokens: Tensor, value: Tensor) -> Tensor:
    """What is said of tokens, [rows, length], as it broadcasts to their values; of a whole row, its first's."""
    return tokens[:, :1] if value.ndim == 2 else tokens.reshape(*tokens.shape, *[1] * (value.ndim - 2))
