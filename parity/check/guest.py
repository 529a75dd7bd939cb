"""Replaying recorded calls on the candidate through its adapter; what comes out is put in the reference's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parity.check import tree
from parity.check.adapter import Adapter, DoesNotFit, Recorded, own_layer
from parity.check.candidate import CandidateError, defaults_kept, said, skeleton
from parity.check.guard import Calls
from parity.check.held import Holder, restore
from parity.check.record import Call
from parity.check.replay import Replayed, argument_name, arguments, as_record, cotangent, defined, same, with_leaves
from parity.check.sandbox import TimeUp, alarm
from parity.check.weights import back
from parity.compare import Quantity, Record, Unequal
from parity.oracle import lifted
from reimpl.weights import Rule

HANGS = "the candidate does not return within"


class Hangs(Unequal):
    """A candidate that takes too long, which it would do again."""


@dataclass
class Guest:
    """The candidate's module in one dtype, in the place of one module of the reference.

    Attributes:
        seconds: what one call may take.
        state: what the adapter keeps from one step of a scenario to the next.
        notes: what is tolerated but worth saying.
        calls: the reference's functions that it runs.
        on_disk: whether its rules lead from the names on disk, not from those in memory.
    """

    adapter: Adapter
    module: nn.Module
    rules: Sequence[Rule]
    config: Any
    layer_idx: int | None
    dtype: torch.dtype
    seconds: float = 60.0
    state: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    on_disk: bool = False
    _last: Call | None = None

    def __post_init__(self) -> None:
        self._fresh = Holder(self.module).held()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def context(self) -> Any:
        """Float64 runs without the float32 that is asked for by name, as the truth does."""
        return lifted() if self.dtype is torch.float64 and self.adapter.lift else nullcontext()

    def run(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Call it: what is returned, and the cache it left.

        Raises:
            Unequal: if it raises, takes too long, or returns nothing that could be held against the reference's.
        """
        if call.step == 0:
            self.state = {}
            restore(self.module, self._fresh if call.held else {})
        elif (self.state or call.held) and call.earlier and self._last is not call.earlier[-1]:
            for each in call.earlier:  # what the adapter keeps is of another text
                self.run(each, *arguments(each, self.dtype))
        self._last = call
        held = list(tree.caches((args, kwargs)).values())
        recorded = Recorded(
            args,
            kwargs,
            call.names,
            self.config,
            self.layer_idx,
            call.step,
            self.dtype,
            held[0] if held else None,
            self.state,
        )
        try:
            with alarm(self.seconds), self.calls.noted(), self.context(), defaults_kept():
                returned = self.adapter.call(self.module, recorded)
        except TimeUp:
            raise Hangs(f"{HANGS} {self.seconds:g} s") from None
        except DoesNotFit as error:
            name = type(self.module).__name__
            raise CandidateError(
                f"candidate {name} cannot be called as the reference is: {error}; write an adapter and give it with"
                f" --adapter:\n\n{skeleton(name)}"
            ) from None
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise Unequal(f"the candidate raises {said(error)}") from error
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise Unequal(f"the adapter returns {_kind(returned)}, but should return a pair: output, cache")
        return returned

    def replay(self, call: Call, truth: Record) -> Replayed:
        """One call with arguments of its own, in the terms of the truth.

        Raises:
            Unequal: if what comes out cannot be held against what the reference returned.
        """
        args, kwargs = arguments(call, self.dtype)
        before, kept = tree.tensors(tree.snapshot((args, kwargs))), list(tree.caches((args, kwargs)))
        with torch.no_grad():
            output, cache = self.run(call, args, kwargs)
        after = tree.tensors((args, kwargs))
        written = [
            argument_name(path)
            for path, value in before.items()
            if not any(path[: len(outer)] == outer for outer in kept) and not same(value, after.get(path))
        ]
        for value in tree.tensors((output, cache)).values():
            if odd := _odd(value):
                raise Unequal(f"the candidate returns a tensor that {odd}; it should be a plain one on the CPU")
        contents = self.contents(values_of(truth, "cache"), args, kwargs, output, cache)
        return Replayed(self.outputs(values_of(truth, "output"), output), contents, written)

    def outputs(self, wanted: Mapping[str, Tensor], output: Any) -> dict[str, Tensor]:
        """The floating-point tensors returned, under the names that the reference's have."""
        found = {name: value for name, value in tree.named("output", output).items() if value.is_floating_point()}
        if not wanted:
            return {}
        if not found:
            raise Unequal(f"the candidate returns {_kind(output)}, but should return {_listed(wanted)}")
        if found.keys() == wanted.keys():
            return found
        first, theirs = next(iter(found)), next(iter(wanted))
        if first != theirs and {first, theirs} <= {"output", "output[0]"}:
            self.notes[
                "returns a tensor where the reference returns a tuple"
                if first == "output"
                else "returns a tuple where the reference returns a tensor"
            ] = None
        renamed = {theirs if name == first else name: value for name, value in found.items()}
        for name in wanted.keys() - renamed.keys():
            self.notes[f"does not return {name}, which is not judged"] = None
        for name in renamed.keys() - wanted.keys():
            self.notes[f"returns {name} beside what the reference returns, which is not judged"] = None
        return {name: renamed[name] for name in wanted if name in renamed}

    def contents(
        self, wanted: Mapping[str, Tensor], args: Any, kwargs: Any, output: Any, cache: Any
    ) -> dict[str, Tensor]:
        """What the cache holds, under the names that the reference's contents have."""
        cache = next(iter(tree.caches(output).values()), None) if cache is None else cache
        if cache is None or not wanted:
            if wanted:
                self.notes["keeps no cache: its contents are not judged"] = None
            return {}
        if tree.is_cache(cache):
            return tree.remembered((args, kwargs, output, cache))
        return _as_named(cache, own_layer(wanted, self.layer_idx))

    def forward(self, call: Call, truth: Record) -> tuple[Record, list[str]]:
        """Outputs and cache, and the arguments that were written to."""
        replayed = self.replay(call, truth)
        return as_record(call, replayed), replayed.written

    def gradients(self, call: Call, outputs: Mapping[str, Tensor]) -> Record:
        """Gradients of every floating-point argument and of every parameter, by the reference's names.

        Args:
            outputs: what the reference returns, by name.

        Raises:
            Unequal: if nothing can be differentiated.
        """
        with torch.enable_grad(), self.context():
            leaves, (args, kwargs) = with_leaves(call, self.dtype)
            output, _ = self.run(call, args, kwargs)
            results = {name: value for name, value in self.outputs(outputs, output).items() if value.requires_grad}
            wanted = [*leaves.values(), *self.parameters.values()]
            values = _differentiated(call, results, wanted)
        record = Record([], [], [])
        named = dict(zip(leaves, values, strict=False))
        of_parameters = dict(zip(self.parameters, values[len(leaves) :], strict=True))
        try:
            named |= back(of_parameters, self.rules)
        except Exception as error:  # of a function of the user's
            raise Unequal(f"the rules of the weights do not lead back: {said(error)}") from error
        for name, value in named.items():
            record.quantities.append(Quantity(f"gradient of {name}", "gradient", call.step))
            record.values.append(value)
            record.valid.append(defined(call, value) if name in leaves else None)
        return record


def _odd(value: Tensor) -> str | None:
    """Why nothing can be compared with a tensor, if so."""
    if value.is_meta:
        return "is on the meta device and holds no numbers"
    if value.is_nested or value.layout is not torch.strided:
        return f"is {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')}"
    return None if value.device.type == "cpu" else f"is on {value.device}"


def _differentiated(call: Call, results: Mapping[str, Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    if not results:
        return [torch.zeros_like(each) for each in wanted]
    cotangents = [cotangent(call, name, result) for name, result in results.items()]
    try:
        return torch.autograd.grad(
            list(results.values()), list(wanted), cotangents, allow_unused=True, materialize_grads=True
        )
    except Exception as error:
        raise Unequal(f"the candidate cannot be differentiated: {said(error)}") from error


def values_of(record: Record, verdict: str) -> dict[str, Tensor]:
    """The values of a record that count for one verdict, by name."""
    return {q.name: value for q, value in zip(record.quantities, record.values, strict=True) if q.verdict == verdict}


def _as_named(cache: Any, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys and values as an adapter gives them, under the reference's names: one pair, pairs, or a mapping."""
    if isinstance(cache, Mapping):
        return dict(cache)
    flat = list(tree.tensors(cache).values())
    if len(flat) != len(wanted):
        raise Unequal(f"the adapter gives {len(flat)} cached tensors, but the reference holds {_listed(wanted)}")
    return dict(zip(wanted, flat, strict=True))


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of ({', '.join(type(each).__name__ for each in value[:4])})"
    return "None" if value is None else f"a {type(value).__name__}"


def _listed(values: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in values.items()) or "nothing"
