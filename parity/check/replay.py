"""Replaying a recorded call on any module, in any dtype: the reference's own submodule, or a candidate in its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from parity.check import tree
from parity.check.held import restore
from parity.check.record import Call
from parity.compare import Quantity, Record
from parity.oracle import lifted
from parity.tiny import draw

Caller = Callable[..., Any]
"""What is called with the recorded arguments: a module, or a function that calls one."""


@dataclass(frozen=True)
class Replayed:
    """What came out of a replayed call.

    Attributes:
        output: the tensors that were returned, by name.
        cache: the contents of all caches afterwards, those returned among them.
        written: the arguments, caches aside, that were written to.
    """

    output: dict[str, Tensor]
    cache: dict[str, Tensor]
    written: list[str]


def arguments(call: Call, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fresh arguments of a call, as they are where the whole model runs in a dtype.

    What excludes by the lowest number of one dtype does so in the other.
    """
    dtypes = {} if call.dtypes is None else call.dtypes(dtype)
    tables = {} if call.tables is None else call.tables(dtype)

    def cast(path: tree.Path, tensor: Tensor) -> Tensor:
        if path in tables and tables[path].shape == tensor.shape:
            return tables[path].clone()
        if not tensor.is_floating_point():
            return tensor.clone()
        wanted = dtypes.get(path, dtype)
        lowest = tensor == torch.finfo(tensor.dtype).min
        return (
            torch.where(lowest, torch.finfo(wanted).min, tensor.to(wanted))
            if lowest.any()
            else tensor.to(wanted, copy=True)
        )

    return tree.converted(call.given, cast, dtype)


def exactly(module: Caller, call: Call) -> Replayed:
    """Replay a call as it was recorded, without rounding or casting anything."""
    if isinstance(module, nn.Module):
        restore(module, call.held)
    return run(module, *tree.snapshot(call.given))


def run(module: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replayed:
    """Call with arguments which are this call's own, and read what it returns, remembers and writes to."""
    given = tree.snapshot((args, kwargs))
    with torch.no_grad():
        output = module(*args, **kwargs)
    kept = tree.caches((args, kwargs))
    written = [
        argument_name(path)
        for path, before in tree.tensors(given).items()
        if not any(path[: len(outer)] == outer for outer in kept)
        and not same(before, tree.tensors((args, kwargs)).get(path))
    ]
    return Replayed(tree.named("output", output), tree.remembered((args, kwargs, output)), written)


def argument_name(path: tree.Path) -> str:
    """An argument's name: `hidden_states`, or `argument 0` if it was given by its place."""
    side, key, *rest = path
    return tree.spelled(key if side == 1 else f"argument {key}", tuple(rest))


def same(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, NaN included."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def equal(call: Call, replayed: Replayed) -> list[str]:
    """The names of what a replay got otherwise than the recording; empty if it is exact."""
    recorded = tree.named("output", call.output) | tree.remembered((*call.left, call.output))
    ours = replayed.output | replayed.cache
    names = recorded.keys() | ours.keys()
    return sorted(name for name in names if name not in recorded or not same(recorded[name], ours.get(name)))


def forward(module: Caller, call: Call, dtype: torch.dtype) -> Record:
    """Outputs and, after the call, the whole cache. Float64 runs lifted, as the truth does."""
    with lifted() if dtype is torch.float64 else nullcontext():
        replayed = run(module, *arguments(call, dtype))
    return as_record(call, replayed)


def as_record(call: Call, replayed: Replayed) -> Record:
    """A replay as it is judged: floating-point quantities, and which of their entries are defined."""
    record = Record([], [], [])
    for verdict, values in (("output", replayed.output), ("cache", replayed.cache)):
        for name, value in values.items():
            if value.is_floating_point():
                record.quantities.append(Quantity(name, verdict, call.step))
                record.values.append(value)
                record.valid.append(defined(call, value, verdict))
    return record


def defined(call: Call, value: Tensor, verdict: str = "output") -> Tensor | None:
    """Which entries of a quantity belong to tokens that are no padding; None: all.

    Tokens are found by the shape: [rows, tokens, ...], [rows * tokens, ...], or [rows, heads, tokens, ...]; of a cache
    the last tokens so far.
    """
    valid = call.valid_so_far if verdict == "cache" else call.valid
    if valid is None:
        return None
    rows, count = valid.shape
    if verdict == "cache":
        if value.ndim != 4 or value.shape[0] != rows or value.shape[2] > count:
            return None
        return valid[:, None, count - value.shape[2] :, None]
    if value.ndim >= 2 and value.shape[:2] == (rows, count):
        return valid.reshape(rows, count, *[1] * (value.ndim - 2))
    if value.ndim >= 1 and value.shape[0] == rows * count:
        return valid.reshape(-1, *[1] * (value.ndim - 1))
    if value.ndim >= 3 and value.shape[0] == rows and value.shape[2] == count:
        return valid.reshape(rows, 1, count, *[1] * (value.ndim - 3))
    return None


def gradients(
    module: nn.Module,
    call: Call,
    dtype: torch.dtype,
    parameters: Mapping[str, Tensor] | None = None,
    caller: Caller | None = None,
    without: Collection[str] = (),
) -> Record:
    """Gradients of every floating-point argument and parameter; a missing one counts as zero.

    Args:
        parameters: what is differentiated by, by name; the module's own unless given.
        caller: what is called, where that is not the module itself.
        without: results that are not differentiated, as the reference has them in some of its ways only.
    """
    parameters = dict(module.named_parameters()) if parameters is None else parameters
    with lifted() if dtype is torch.float64 else nullcontext(), torch.enable_grad():
        leaves, given = with_leaves(call, dtype)
        results = differentiable((caller or module)(*given[0], **given[1]))
        results = {name: value for name, value in results.items() if name not in without}
        wanted = leaves | dict(parameters)
        values: tuple[Tensor, ...] = ()
        if results:
            cotangents = [cotangent(call, name, result) for name, result in results.items()]
            values = torch.autograd.grad(
                list(results.values()), list(wanted.values()), cotangents, allow_unused=True, materialize_grads=True
            )
    record = Record([], [], [])
    for name, value in zip(wanted, values, strict=False):
        record.quantities.append(Quantity(f"gradient of {name}", "gradient", call.step))
        record.values.append(value)
        record.valid.append(defined(call, value) if name in leaves else None)
    return record


def scaled(call: Call, factor: float) -> Call:
    """The call with other magnitudes of what is learnt through: neither of tables and masks, nor of caches."""
    held = list(tree.caches(call.given))

    def scale(path: tree.Path, tensor: Tensor) -> Tensor:
        fixed = FIXED.search(_parameter(call, path)) or any(path[: len(outer)] == outer for outer in held)
        return tensor.clone() if fixed or not tensor.is_floating_point() else tensor * factor

    args, kwargs = tree.converted(call.given, scale)
    return replace(call, args=args, kwargs=kwargs)


FIXED = re.compile(r"mask|position|cos|sin|rotary|rope")
"""What arguments are called that nothing is learnt through: of tables that hold every number twice, one may be read."""


def with_leaves(call: Call, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]:
    """What a call is differentiated by, by name, and fresh arguments: copies of that, as they may be written to."""
    leaves: dict[str, Tensor] = {}

    def leaf(path: tree.Path, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or FIXED.search(_parameter(call, path)):
            return tensor
        made = tensor.detach().requires_grad_()
        leaves[argument_name(path)] = made
        return made.clone()

    return leaves, tree.converted(arguments(call, dtype), leaf)


def _parameter(call: Call, path: tree.Path) -> str:
    """The parameter of the forward that an argument is for, however it was given."""
    side, key, *_ = path
    return key if side == 1 else call.names[key] if key < len(call.names) else ""


def differentiable(output: Any) -> dict[str, Tensor]:
    """The results of a call that something can be differentiated of."""
    return {
        name: value
        for name, value in tree.named("output", output).items()
        if value.is_floating_point() and value.requires_grad
    }


def cotangent(call: Call, name: str, result: Tensor) -> Tensor:
    """What a result is multiplied with to get a scalar; zero on padded rows."""
    drawn = draw.bfloat16(draw.normal(tuple(result.shape), 0, f"cotangent {name}"))
    valid = defined(call, result)
    return (drawn if valid is None else drawn * valid).to(result.dtype)
