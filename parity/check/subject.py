"""What a candidate is held against: any class of the installed transformers, at home in a tiny model.

`resolve("llama:LlamaAttention")` finds the class; a point of its configuration space makes it a tiny model with
sensitive weights; scenarios through that whole model record what the class is called with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity import routing
from parity.check import drawn, drive, replay, tree
from parity.check.held import restore
from parity.check.record import Call, Recorder, rounded, tables_of
from parity.compare import Quantity, Record, Unequal
from parity.errors import InputError
from parity.oracle import lifted
from parity.tiny import models, sensitive, vary
from parity.tiny.models import PLAIN, Point

IMPLEMENTATIONS = ("eager", "sdpa")


class SubjectError(InputError):
    """A reference that cannot be found, or that cannot serve."""


@dataclass(frozen=True)
class Subject:
    """A class of the reference.

    Attributes:
        model_type: Hugging Face's name.
        name: of the class; None for the whole model, as the task has it.
        task: causal, masked or seq2seq: which head the tiny model gets.
        directory: of the checkpoint, where the model and its weights are read from one.
    """

    model_type: str
    name: str | None
    task: str
    directory: Path | None = None

    def __str__(self) -> str:
        return str(self.directory) if self.directory else f"{self.model_type}:{self.name or 'the whole model'}"

    def points(self, count: int = 4, seed: int = 0) -> list[Point]:
        """The plain configuration, then variations of it which the class accepts, builds and runs.

        A checkpoint has a single one.

        Raises:
            SubjectError: if the model type cannot serve, with the reason.
        """
        if self.directory:
            return [PLAIN]
        try:
            return vary.points(self.model_type, self.task, count, seed)
        except models.Unshrinkable as error:
            raise SubjectError(str(error)) from error

    def build(self, point: Point = PLAIN, seed: int = 0) -> Built:
        """The class at home in a tiny model, or in the model of a checkpoint.

        Raises:
            SubjectError: if the model has no such module, or cannot be built.
        """
        model = self.model(point, torch.float32)
        try:
            weights = sensitive.state(model, seed) if self.directory is None else models.stored(self.directory, model)
        except models.Unshrinkable as error:
            raise SubjectError(str(error)) from error
        return Built(self, point, model, self._path(model, point.place), weights)

    def model(self, point: Point, dtype: torch.dtype) -> nn.Module:
        """The whole model in a dtype, built as loading a checkpoint in it does, its weights not yet set.

        Raises:
            SubjectError: with the reason, if it cannot be built.
        """
        try:
            if self.directory is not None:
                return models.of_checkpoint(self.directory, self.task, dtype)
            return models.model(self.model_type, self.task, point, dtype, cls=self._whole_class)
        except models.Unshrinkable as error:
            raise SubjectError(str(error)) from error

    @property
    def _whole_class(self) -> str | None:
        return self.name if self.name and models.is_whole(self.model_type, self.name) else None

    def _path(self, model: nn.Module, place: int) -> str:
        """Where a module of the class is in a model: one of several, counted round."""
        if self.name is None or type(model).__name__ == self.name:
            return ""
        there: dict[str, list[str]] = {}
        for path, module in model.named_modules():
            there.setdefault(type(module).__name__, []).append(path)
        if self.name not in there:
            close = get_close_matches(self.name, there, n=3, cutoff=0.4) or sorted(there)[:5]
            raise SubjectError(
                f"{self.model_type}: the {self.task} model has no {self.name}; it has {', '.join(close)}"
                f" (`parity list --references --filter {self.model_type}` lists all)"
            )
        return there[self.name][place % len(there[self.name])]


@dataclass(eq=False)
class Built:
    """A class of the reference at one point of its configuration space.

    Attributes:
        model: the whole tiny model in float32, its weights sensitive, in evaluation mode.
        path: where in it the class's module is; empty for the whole model.
        whole: the tensors of the whole model by name, float64 and representable in bfloat16.
    """

    subject: Subject
    point: Point
    model: nn.Module
    path: str
    whole: dict[str, Tensor]
    _models: dict[torch.dtype, nn.Module] = field(default_factory=dict)
    _calls: dict[str, list[Call]] = field(default_factory=dict)
    _recorded: dict[Any, list[Call]] = field(default_factory=dict)
    _truths: dict[Any, Record] = field(default_factory=dict)
    _optionals: dict[Any, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sensitive.load(self.model, self.whole)
        self._models[torch.float32] = self.model

    @property
    def config(self) -> Any:
        """The configuration that the module was made with: a copy, so that nobody disturbs the model's."""
        return deepcopy(next((each for each in self._given[0] if hasattr(each, "to_diff_dict")), self.model.config))

    @property
    def constructor(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the module was made with, copied."""
        return deepcopy(self._given)

    @property
    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return getattr(self.model.get_submodule(self.path), models.GIVEN, ((self.model.config,), {}))

    @property
    def layer_idx(self) -> int | None:
        """Which layer of the model the module belongs to, by its path."""
        numbers = re.findall(r"\.(\d+)(?=\.|$)", f".{self.path}")
        return int(numbers[0]) if numbers else None

    @property
    def implementations(self) -> Sequence[str]:
        """How the reference can compute its attention."""
        return [name for name in IMPLEMENTATIONS if models.supports(self.model, name)]

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The module's own tensors by the names of its state, float64 and representable in bfloat16."""
        prefix = f"{self.path}." if self.path else ""
        return {name.removeprefix(prefix): value for name, value in self.whole.items() if name.startswith(prefix)}

    @cached_property
    def disk(self) -> dict[str, Tensor]:
        """The same tensors by the names under which a checkpoint of the whole model holds them, without their prefix.

        The names are found by marking the module's tensors and seeing which of those on disk are marked.
        """
        return models.on_disk(self.model, self.path)

    @cached_property
    def order_on_disk(self) -> dict[str, Tensor]:
        """Of every tensor on disk which entries of the module's parameters it holds: their numbers, from 1.

        Parameters are counted one after the other; 0 are those that belong to none. The numbers are written to disk.

        Raises:
            Unequal: if what is written is not the same entries in another order.
        """
        numbered = deepcopy(self.whole_model(torch.float64))
        first = 1
        with torch.no_grad():
            for tensor in numbered.get_submodule(self.path).buffers():
                if tensor.is_floating_point():
                    tensor.zero_()
            for parameter in numbered.get_submodule(self.path).parameters():
                count = parameter.numel()
                parameter.copy_(torch.arange(first, first + count).view_as(parameter))
                first += count
        order = models.on_disk(numbered, self.path)
        if any(
            bool((each != each.round()).any() or (each < 0).any() or (each >= first).any()) for each in order.values()
        ):
            raise Unequal("what is on disk is computed from the weights, so that no gradient can be told of it")
        return {name: each.long() for name, each in order.items()}

    def gradients_on_disk(self, record: Record) -> Record:
        """Gradients of the module's parameters as those of the tensors on disk; all others as they are."""
        names = {f"gradient of {name}" for name, _ in self.model.get_submodule(self.path).named_parameters()}
        own = [i for i, quantity in enumerate(record.quantities) if quantity.name in names]
        rest = [i for i in range(len(record.quantities)) if i not in own]
        if not own:
            return record
        flat = torch.cat([record.values[own[0]].new_zeros(1), *(record.values[i].flatten() for i in own)])
        order = {name: places for name, places in self.order_on_disk.items() if places.all()}
        step = record.quantities[own[0]].step
        return Record(
            [record.quantities[i] for i in rest]
            + [Quantity(f"gradient of {name}", "gradient", step) for name in order],
            [record.values[i] for i in rest] + [flat[places] for places in order.values()],
            [record.valid[i] for i in rest] + [None] * len(order),
            record.choices,
        )

    def whole_model(self, dtype: torch.dtype) -> nn.Module:
        """The whole model in a dtype, built as loading a checkpoint in it does."""
        if dtype not in self._models:
            model = self.subject.model(self.point, dtype)
            sensitive.load(model, self.whole)
            self._models[dtype] = model
        return self._models[dtype]

    def module(self, dtype: torch.dtype, implementation: str = "eager", call: Call | None = None) -> nn.Module:
        """A fresh copy of the class's module in a dtype, computing its attention in one of the reference's ways.

        Args:
            call: that it is to be called with, where it remembers earlier ones in itself.
        """
        module = deepcopy(self.whole_model(dtype).get_submodule(self.path))
        models.use(module, implementation)
        if call is not None:
            settle(module, call, dtype)
        return module

    def refusal(self, scenario: str) -> str | None:
        """Why the model does not go through a scenario; None if it does."""
        try:
            self.calls(scenario)
        except drive.Undriven as error:
            return str(error)
        return None

    def calls(self, scenario: str) -> list[Call]:
        """The calls of the module in a scenario, in order, with every number rounded to one of bfloat16.

        Raises:
            Undriven: where the model does not go through the scenario, with the reason.
        """
        if scenario not in self._calls:
            scale = self.text(scenario).scale
            calls = [rounded(replay.scaled(call, scale)) for call in self.recorded(scenario, torch.float32)]
            for index, call in enumerate(calls):
                call.dtypes = partial(self._dtypes, scenario, index)
                call.tables = partial(self._tables, scenario, index)
                call.earlier = calls[:index]
            with suppress(Exception):  # of a module that does not run in float64: its caches stay as recorded
                chain(self.module(torch.float64), calls)
            self._calls[scenario] = calls
        return self._calls[scenario]

    def recorded(self, scenario: str, dtype: torch.dtype, implementation: str = "eager") -> list[Call]:
        """The calls as they were recorded in a dtype; in float64 the model runs lifted."""
        key = (scenario, dtype, implementation)
        if key not in self._recorded:
            model = self.whole_model(dtype)
            self._recorded[key] = record(model, self.subject.task, self.text(scenario), self.recorder(model), dtype)
        return self._recorded[key]

    def text(self, scenario: str) -> drive.Text:
        """What is run through the model in a scenario, by its name or its line.

        Raises:
            ScenarioError: for a line that is not understood.
        """
        return drive.TEXTS[scenario] if scenario in drive.TEXTS else drawn.text(scenario)

    def recorder(self, model: nn.Module) -> Recorder:
        """What records the module's calls in a model."""
        return Recorder({self.path: model.get_submodule(self.path)})

    def _dtypes(self, scenario: str, index: int, dtype: torch.dtype) -> Mapping[tree.Path, torch.dtype]:
        """The dtypes that the tensors of a call have where the whole model runs in `dtype`."""
        try:
            calls = self.recorded(scenario, dtype)
        except drive.Undriven:
            return {}
        return tree.dtypes(calls[index].given) if index < len(calls) else {}

    def _tables(self, scenario: str, index: int, dtype: torch.dtype) -> Mapping[tree.Path, Tensor]:
        """What the whole model computes of positions alone for a call, where it runs in `dtype`."""
        try:
            calls = self.recorded(scenario, dtype)
        except drive.Undriven:
            return {}
        return tables_of(calls[index]) if index < len(calls) else {}

    def truth(self, call: Call, measure: str = "forward") -> Record:
        """What the unmodified reference computes of a call in float64, lifted, and what its routers choose."""
        key = (id(call), measure)
        if key not in self._truths:
            self.warm(call, torch.float64)
            run = partial(self.measured, self.module(torch.float64, call=call), call, torch.float64, measure)
            self._truths[key] = routing.watched(run, {})
        return self._truths[key]

    def warm(self, call: Call, dtype: torch.dtype) -> None:
        """Run what is found out by running models, so that nobody who watches a call sees it."""
        self._optional(call)
        replay.arguments(call, dtype)

    def like(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call with other arguments, of which the same results count."""
        other = replace(call, args=args, kwargs=kwargs)
        self._optionals[id(other)] = self._optional(call)
        return other

    def yardsticks(self, call: Call, dtype: torch.dtype, measure: str = "forward") -> list[Record]:
        """What the reference computes of a call in a dtype, in each of its own ways."""
        return [self.measured(self.module(dtype, name, call), call, dtype, measure) for name in self.implementations]

    def measured(self, module: nn.Module, call: Call, dtype: torch.dtype, measure: str = "forward") -> Record:
        """One side's record of a call: `forward`, or `gradients`."""
        if measure == "forward":
            return self.comparable(call, replay.forward(module, call, dtype))
        return replay.gradients(module, call, dtype, without=self._optional(call))

    def comparable(self, call: Call, record: Record) -> Record:
        """A record without what the reference itself returns in one of its ways only, such as attention's weights."""
        kept = [i for i, each in enumerate(record.quantities) if each.name not in self._optional(call)]
        return Record(
            [record.quantities[i] for i in kept], [record.values[i] for i in kept], [record.valid[i] for i in kept]
        )

    def _optional(self, call: Call) -> set[str]:
        key = id(call)
        if key not in self._optionals:
            runs = [
                replay.run(self.module(torch.float32, name, call), *replay.arguments(call, torch.float32))
                for name in self.implementations
            ]
            names = [{name for name, value in each.output.items() if value.is_floating_point()} for each in runs]
            self._optionals[key] = set().union(*names) - names[0].intersection(*names)
        return self._optionals[key]


def _from(left: Mapping[tree.Path, Tensor], cache: tree.Path, path: tree.Path, tensor: Tensor) -> Tensor:
    """What was left in a cache, where it is of the same shape; else the tensor itself."""
    own = left.get(path[len(cache) :]) if path[: len(cache)] == cache else None
    fits = own is not None and own.shape == tensor.shape and tensor.is_floating_point()
    return own.clone() if own is not None and fits else tensor.clone()


def chain(module: nn.Module, calls: Sequence[Call], begin: Callable[[Call], None] = lambda call: None) -> None:
    """Let every call find in its cache what a module itself left there, in float64, of the calls before it.

    So whoever keeps a cache of their own has the same in it.

    Args:
        begin: told of every call before it is made.
    """
    left = dict[tree.Path, Tensor]()
    for call in calls:
        begin(call)
        if call.step == 0:
            left = {}
        held = list(tree.caches(call.given))
        if len(held) != 1:
            return
        if left:
            call.args, call.kwargs = tree.converted(call.given, partial(_from, left, held[0]))
        args, kwargs = replay.arguments(call, torch.float64)
        (before,) = tree.caches(tree.snapshot((args, kwargs))).values()
        there = tree.tensors(before)
        with torch.no_grad(), lifted():
            module(*args, **kwargs)
        (after,) = tree.caches((args, kwargs)).values()
        changed = {p: t for p, t in tree.tensors(after).items() if not replay.same(t, there.get(p))}
        left |= {path: tensor.clone() for path, tensor in changed.items()}


def settle(module: nn.Module, call: Call, dtype: torch.dtype) -> None:
    """Let a module that remembers calls in itself remember those before a call, as it computes them in a dtype."""
    if not call.held:
        return
    restore(module, (call.earlier[0] if call.earlier else call).held)
    with lifted() if dtype is torch.float64 else nullcontext():
        for each in call.earlier:
            replay.run(module, *replay.arguments(each, dtype))


def record(
    model: nn.Module, task: str, text: drive.Text, recorder: Recorder, dtype: torch.dtype = torch.float32
) -> list[Call]:
    """The calls of some modules of a model in a scenario; in float64 it runs lifted."""
    with lifted() if dtype is torch.float64 else nullcontext():
        drive.drive(model, task, text, recorder)
    return recorder.calls
