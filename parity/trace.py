"""Where two implementations first part, without the candidate having to cooperate.

The reference is watched from outside: the inputs and outputs of its submodules, what its rotary function returns, what
goes into and comes out of its cache, scores before and weights after the softmax. Of the candidate nothing is known, so
every number that any of its operations produces is collected. A quantity of the reference is there if its numbers are
among them. That needs no names and no shapes: the candidate may split heads, fuse projections or transpose at will, and
in float64 two different numbers do not agree to nine digits by chance.

The first quantity whose numbers are missing is where the two part. Scores, weights and activations are optional, since
a fused kernel never forms them: one of those is only named when something that must exist is missing after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parity.case import Case, Step
from parity.oracle import lifted
from parity.pair import Pair, input_of, tables_of, tabulate
from parity.patterns import describe
from parity.reference import modeling
from parity.scenario import Scenario

DIGITS = 1e-9  # float64 rounding stays far below, coincidence among a few hundred thousand numbers far above
SHORT = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


@dataclass(frozen=True)
class Seen:
    """A quantity that the reference formed, and whether a correct candidate must form it too."""

    name: str
    value: Tensor
    required: bool = True


@dataclass(frozen=True)
class Divergence:
    """The first step and quantity at which the two sides part, and what the output's error looks like."""

    quantity: str
    step: Step
    where: str
    patterns: tuple[str, ...] = ()


def locate(pair: Pair, scenario: Scenario) -> Divergence | None:
    """Run both sides in float64, step by step, and find the first quantity of the reference that the candidate lacks.

    Returns:
        None if the candidate forms every quantity, so that the two part in precision only.
    """
    case = pair.case(scenario)
    reference, candidate = pair.reference(torch.float64), pair.candidate(torch.float64)
    reference.use(pair.family.implementations[0])
    tabulate(pair, case, torch.float64)
    for side in (reference, candidate):
        pair.ready(side, scenario.seed)
    caches = [side.new_cache() if case.cached else None for side in (reference, candidate)]
    tables = tables_of(reference, case)
    for step in case.steps:
        x = input_of(reference, case)[:, step.start : step.stop]
        with torch.no_grad(), lifted():
            seen, theirs = _watch(reference.module, modeling(pair.family.model_type), caches[0])(
                lambda: reference(case, step, x, tables, caches[0])
            )
        with torch.no_grad(), Collect() as pool:
            ours = candidate(case, step, x, tables, caches[1])
        numbers = pool.numbers([x, *(tables or ())])
        parted = _first_missing(seen, numbers, case, step)
        output = next(iter(theirs))
        if parted is None and not _found(theirs[output], numbers).all():
            parted = Seen("the output", theirs[output]), []
        if parted is not None:
            return Divergence(
                parted[0].name, step, _sentence(*parted, step), describe(case, step, ours[output], theirs[output])
            )
    return None


def _sentence(missing: Seen, exact: Sequence[str], step: Step) -> str:
    when = "" if step.index == 0 else f" in step {step.index}, tokens {step.start} to {step.stop - 1}"
    before = f"; {_listed(exact)} exact" if exact else ""
    return f"first departs at {missing.name}{when}{before}"


def _listed(names: Sequence[str]) -> str:
    *most, last = names[-4:]
    return f"{', '.join(most)} and {last} are" if most else f"{last} is"


def _first_missing(seen: Sequence[Seen], numbers: Tensor, case: Case, step: Step) -> tuple[Seen, list[str]] | None:
    """The first quantity that is missing, and the names of those before and beside it that are there."""
    there = [bool(_found(_defined(each.value, case, step), numbers).all()) for each in seen]
    required = [i for i, each in enumerate(seen) if each.required and not there[i]]
    if not required:
        return None
    first = required[0]
    while first > 0 and not there[first - 1] and not seen[first - 1].required:
        first -= 1
    beside = [each.name for each, found in zip(seen[: first + 3], there, strict=False) if found and each.required]
    return seen[first], beside


def _found(value: Tensor, numbers: Tensor) -> Tensor:
    """Which entries of a tensor are among sorted numbers."""
    flat = value.detach().double().reshape(-1).contiguous()
    at = torch.searchsorted(numbers, flat).clamp(1, len(numbers) - 1)
    nearest = torch.minimum((numbers[at] - flat).abs(), (numbers[at - 1] - flat).abs())
    return nearest <= DIGITS * flat.abs() + DIGITS**2


def _defined(value: Tensor, case: Case, step: Step) -> Tensor:
    """The entries of a tensor that belong to valid tokens, by the axis that counts the step's or the cache's tokens."""
    if case.valid is None or value.shape[0] != case.valid.shape[0]:
        return value
    for axis in range(1, min(value.ndim, 3)):
        for start in (step.start, case.first_key(step)):
            if value.shape[axis] == step.stop - start:
                return value.transpose(1, axis)[case.valid[:, start : step.stop]]
    return value


class Collect(TorchDispatchMode):
    """Keeps a copy of every number that an operation produces."""

    def __init__(self) -> None:
        super().__init__()
        self._produced: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._keep(result)
        return result

    def _keep(self, result: Any) -> None:
        if isinstance(result, Tensor) and result.is_floating_point():
            self._produced.append(result.detach().double().reshape(-1).clone())
        elif isinstance(result, list | tuple):
            for part in result:
                self._keep(part)

    def numbers(self, given: Sequence[Tensor] = ()) -> Tensor:
        """All numbers collected and those given, sorted."""
        known = [tensor.double().reshape(-1) for tensor in given]
        return torch.cat([torch.zeros(2, dtype=torch.float64), *known, *self._produced]).sort().values


class _Softmax(TorchFunctionMode):
    """Notes scores and weights wherever a softmax is taken."""

    def __init__(self, seen: list[Seen]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.softmax, torch.nn.functional.softmax, Tensor.softmax):
            self._seen += [Seen("scores", args[0], False), Seen("weights", result, False)]
        return result


def _watch(module: nn.Module, source: Any, cache: Any) -> Callable[[Callable[[], Any]], tuple[list[Seen], Any]]:
    """Runs a call of the reference and returns what it formed, in order, beside its result."""

    def run(call: Callable[[], Any]) -> tuple[list[Seen], Any]:
        seen: list[Seen] = []
        with ExitStack() as stack:
            for path, part in module.named_modules():
                if path and not list(part.children()):
                    stack.callback(part.register_forward_pre_hook(_note_input(seen, path)).remove)
                    stack.callback(part.register_forward_hook(_note_output(seen, path)).remove)
            stack.enter_context(_rotation(seen, source))
            if cache is not None:
                stack.enter_context(_cached(seen, cache))
            stack.enter_context(_Softmax(seen))
            result = call()
        return seen, result

    return run


def _note_input(seen: list[Seen], path: str) -> Callable[..., None]:
    def hook(part: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and isinstance(part, nn.Linear):
            owner, _, name = path.rpartition(".")
            attention = owner == "" or "attn" in owner or "attention" in owner
            label = (
                _owned("context", owner) if attention and name in ("o_proj", "dense", "c_proj") else f"input of {path}"
            )
            seen.append(Seen(label, args[0].detach()))

    return hook


def _note_output(seen: list[Seen], path: str) -> Callable[..., None]:
    def hook(part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        owner, _, name = path.rpartition(".")
        label = _owned(SHORT[name], owner) if name in SHORT else path
        outputs = output if isinstance(output, tuple) else (output,)
        for value in outputs:
            if isinstance(value, Tensor) and value.is_floating_point():
                seen.append(Seen(label, value.detach(), required=bool(list(part.parameters())) or len(outputs) > 1))

    return hook


def _owned(name: str, owner: str) -> str:
    return f"{name} of {owner}" if owner else name


@contextmanager
def _rotation(seen: list[Seen], source: Any) -> Iterator[None]:
    """Note what the modeling module's rotary functions return: rotated queries and keys."""
    original = {
        name: value for name, value in vars(source).items() if name.startswith("apply_rotary") and callable(value)
    }

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            query, key = function(*args, **kwargs)
            seen.extend([Seen("q after rotation", query), Seen("k after rotation", key)])
            return query, key

        return call

    for name, function in original.items():
        setattr(source, name, noting(function))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(source, name, function)


@contextmanager
def _cached(seen: list[Seen], cache: Any) -> Iterator[None]:
    """Note the keys and values that a cache gives back to be attended to."""
    update = cache.update

    def call(*args: Any, **kwargs: Any) -> Any:
        keys, values = update(*args, **kwargs)
        seen.extend([Seen("cached k", keys), Seen("cached v", values)])
        return keys, values

    cache.update = call
    try:
        yield
    finally:
        del cache.update
