"""Recording what a class of the reference is called with while the whole model runs.

Forward hooks take the arguments before, and the results and caches after each call, so that no signature of any version
need be known. What is recorded depends on nothing that happens later: every tensor is copied with its layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parity.check import tree
from parity.check.held import Held, Holder, changing


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        path: where the module is in the model.
        step: of the scenario, from 0.
        args, kwargs: as they were before the call.
        output: what was returned.
        args_after, kwargs_after: the same objects after the call: caches have grown, and what was written to shows.
        valid: which tokens of this step are no padding, [rows, tokens]; None if none is.
        valid_so_far: the same of all tokens up to the end of the step.
        dtypes: for a dtype that the whole model runs in, the dtypes of the call's tensors there, by their paths: some
            stay in float32. None if that is not known: all have that dtype.
        tables: for such a dtype, what the model computes there of positions alone, by path: rotary tables and the like.
            They are no inputs to be rounded, as a candidate may compute them for itself.
        earlier: the calls before it in its scenario.
        seen: the tokens of a row in the steps before it.
        held: what the module remembered in itself before the call, as far as that changes; empty for most.
    """

    path: str
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    output: Any = None
    args_after: tuple[Any, ...] = ()
    kwargs_after: dict[str, Any] = field(default_factory=dict)
    valid: Tensor | None = None
    valid_so_far: Tensor | None = None
    dtypes: Callable[[torch.dtype], Mapping[tree.Path, torch.dtype]] | None = None
    tables: Callable[[torch.dtype], Mapping[tree.Path, Tensor]] | None = None
    earlier: Sequence[Call] = ()
    seen: int = 0
    held: Held = field(default_factory=dict)

    def __str__(self) -> str:
        return f"step {self.step} of {self.path or 'the model'}"

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, as one tree."""
        return self.args, self.kwargs

    @property
    def left(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments after the call, as one tree."""
        return self.args_after, self.kwargs_after

    @property
    def cached(self) -> bool:
        """Whether the call is given a cache."""
        return bool(tree.caches(self.given))


class Recorder:
    """Records every call of some modules of a model, in the order in which the calls begin."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.calls: list[Call] = []
        self.begin(0, None, None)
        self._modules = modules

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        """Record as long as the context lasts."""
        handles, holders = [], {path: Holder(module) for path, module in self._modules.items()}
        for path, module in self._modules.items():
            open_calls: list[Call] = []
            before = self._before(path, open_calls, holders[path])
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(open_calls), with_kwargs=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
        for path, holder in holders.items():
            calls = [call for call in self.calls if call.path == path]
            changed = changing([*(call.held for call in calls), holder.held()]) if calls else set()
            for call in calls:
                call.held = {place: value for place, value in call.held.items() if place in changed}

    def begin(self, step: int, valid: Tensor | None, valid_so_far: Tensor | None, seen: int = 0) -> None:
        """What the following calls belong to."""
        self.step, self.valid, self.valid_so_far, self.seen = step, valid, valid_so_far, seen

    def _before(self, path: str, open_calls: list[Call], holder: Holder) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            copied, named = tree.snapshot((args, kwargs))
            call = Call(path, self.step, copied, named, parameter_names(module))
            call.valid, call.valid_so_far, call.seen = self.valid, self.valid_so_far, self.seen
            call.held = holder.held()
            open_calls.append(call)
            self.calls.append(call)

        return hook

    @staticmethod
    def _after(open_calls: list[Call]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = open_calls.pop()
            call.args_after, call.kwargs_after, call.output = tree.snapshot((args, kwargs, output))

        return hook


TABLES = {"position_embeddings", "rotary_pos_emb", "cos", "sin", "alibi"}
"""What arguments are called that a model computes of positions alone."""


def tables_of(call: Call) -> dict[tree.Path, Tensor]:
    """The tables that a call is given, by their paths."""
    names = {(0, index): name for index, name in enumerate(call.names)} | {(1, name): name for name in call.kwargs}
    return {path: each for path, each in tree.tensors(call.given).items() if names.get(path[:2]) in TABLES}


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """What the positional parameters of a module's forward are called, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def rounded(call: Call) -> Call:
    """The call with every number that it is given rounded to one that bfloat16 represents; results are left out."""

    def nearest(path: tree.Path, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        lowest = torch.finfo(tensor.dtype).min
        return torch.where(tensor == lowest, lowest, tensor.to(torch.bfloat16).to(tensor.dtype))

    args, kwargs = tree.converted(call.given, nearest)
    new = Call(call.path, call.step, args, kwargs, call.names, seen=call.seen, held=call.held)
    new.valid, new.valid_so_far = call.valid, call.valid_so_far
    return new
