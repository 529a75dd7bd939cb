"""The tensors of a scenario, drawn once and shared by the truth, the reference and the candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parity.family import Layer
from parity.scenario import Scenario
from parity.tiny import draw


@dataclass(frozen=True)
class Step:
    """One chunk of the schedule: tokens `start` to `stop` of every row."""

    index: int
    start: int
    stop: int


class Case:
    """Inputs, positions and masks of one scenario.

    Shapes: ids [rows, length], x [rows, length, width], positions [rows, length], valid [rows, length] or None where
    every token is valid, may_attend [rows or 1, 1, length, length]. Values are representable in bfloat16 and kept in
    float64, so that every dtype starts from the same numbers.
    """

    def __init__(
        self, scenario: Scenario, layer: Layer, width: int, vocabulary: int, window: int | None, causal: bool
    ) -> None:
        self.scenario, self.layer = scenario, layer
        self.width, self.vocabulary, self.window, self.causal = width, vocabulary, window, causal
        self.tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
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
        """Hidden states, at the scenario's scale."""
        return self._normal("x", self.width, self.scenario.scale)

    def cotangent(self, output: Tensor) -> Tensor:
        """What the output is multiplied with to get a scalar whose gradient is taken; zero on padded rows."""
        key = (f"cotangent {output.shape[-1]}", output.dtype)
        if key not in self._casts:
            cotangent = self._normal("cotangent", output.shape[-1], 1.0)
            if self.valid is not None:
                cotangent = cotangent * self.valid[..., None]
            self._casts[key] = cotangent.to(output.dtype)
        return self._casts[key]

    def _normal(self, stream: str, width: int, scale: float) -> Tensor:
        scenario = self.scenario
        shape = (scenario.rows, scenario.length, width)
        return draw.bfloat16(draw.normal(shape, scenario.seed, stream) * scale).double()

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
        """Who sees whom, [rows or 1, 1, length, length]. A padded query sees itself, so that no row is empty."""
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
        """The same mask as transformers wants it: 0 where a query may attend, the dtype's minimum where not."""
        key = ("mask", dtype)
        if key not in self._casts:
            floor = torch.zeros((), dtype=dtype).masked_fill(torch.tensor(True), torch.finfo(dtype).min)
            self._casts[key] = torch.where(self.may_attend, torch.zeros((), dtype=dtype), floor)
        return self._casts[key][:, :, step.start : step.stop, self.first_key(step) : step.stop]

    def inputs(self, dtype: torch.dtype) -> Tensor:
        """Hidden states in a dtype."""
        key = ("x", dtype)
        if key not in self._casts:
            self._casts[key] = self.x.to(dtype)
        return self._casts[key]

    def arguments(self) -> dict[str, Tensor]:
        """The tensors that layers have been called with so far, by name; views of them share their version."""
        named = {f"{name} in {dtype}": tensor for (name, dtype), tensor in self._casts.items()}
        for dtype, (cos, sin) in self.tables.items():
            named |= {f"cos in {dtype}": cos, f"sin in {dtype}": sin}
        drawn = {name: vars(self)[name] for name in ("ids", "x", "positions", "may_attend") if name in vars(self)}
        return named | drawn

    def varied(self, **tensors: Tensor | None) -> Case:
        """The same case with some of its tensors exchanged."""
        case = Case(self.scenario, self.layer, self.width, self.vocabulary, self.window, self.causal)
        vars(case).update({name: vars(self)[name] for name in ("ids", "x", "positions", "valid") if name in vars(self)})
        vars(case).update(tensors)
        return case

    @property
    def cached(self) -> bool:
        """Whether the layer is called with a cache."""
        return self.layer.kind.attends and not self.scenario.packing and self.causal
