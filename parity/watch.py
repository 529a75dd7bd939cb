"""What the reference forms on its way to a result, watched from outside: hooks, and functions wrapped while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity.reference import Reference, cache_parts

SHORT = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "query": "q", "key": "k", "value": "v"}
SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)


@dataclass(frozen=True)
class Name:
    """What a quantity is called, and the path of the module it belongs to; empty for the layer itself."""

    name: str
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.owner}" if self.owner else self.name


@dataclass(frozen=True, eq=False)
class Seen:
    """A quantity that the reference formed.

    Attributes:
        name: what it is, and in which module.
        value: its numbers, with their history where autograd recorded it.
        axis: the axis that counts tokens.
        cached: whether these are all the tokens of the cache, not those of one step alone.
        result: its name among the results of a layer, if it is one.
    """

    name: Name
    value: Tensor
    axis: int = 1
    cached: bool = False
    result: str = ""


class Watch:
    """Notes every quantity of the reference in the order in which it is formed."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._running = [""]  # paths of the modules that are running, innermost last
        self._attending: str | None = None  # where a softmax was taken whose context is still to come

    def on(self, side: Reference, cache: Any) -> AbstractContextManager[None]:
        """Watch a reference and its cache as long as the context lasts."""
        return self.over(side.module, side.home, cache)

    @contextmanager
    def over(self, module: nn.Module, source: Any, cache: Any) -> Iterator[None]:
        """Watch a module of the reference, the functions of the Python module it stands in, and its cache."""
        with ExitStack() as stack:
            for path, part in module.named_modules():
                if path:
                    stack.callback(part.register_forward_pre_hook(partial(self._enter, path)).remove)
                    stack.callback(part.register_forward_hook(partial(self._leave, path)).remove)
            for name in vars(source):
                if name.startswith("apply_rotary"):
                    stack.enter_context(_after(source, name, self._rotated))
            for of, part in cache_parts(cache).items():
                stack.enter_context(_after(part, "update", partial(self._cached, of)))
            stack.enter_context(_OnSoftmax(self._attended))
            yield

    def note_results(self, results: Mapping[str, Tensor]) -> None:
        """Note what the layer returned, by name."""
        for name, value in results.items():
            self._note(name, value, "")
            self.seen = [replace(each, result=name) if each.value is value else each for each in self.seen]

    def _note(self, name: str, value: Any, owner: str, **rest: Any) -> None:
        """Keep a quantity, unless it was noted before, as the output of one module is the input of the next."""
        if isinstance(value, Tensor) and value.is_floating_point() and all(value is not s.value for s in self.seen):
            self.seen.append(Seen(Name(name, owner), value, **rest))

    def _enter(self, path: str, part: nn.Module, args: tuple[Any, ...]) -> None:
        self._running.append(path)
        if not args or not _computes(part):
            return
        owner, name = _split(path)
        if self._attending is None:
            self._note(f"input of {name}", args[0], owner)
        else:
            self._note("context", args[0], self._attending)
            self._attending = None

    def _leave(self, path: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running.pop()
        owner, name = _split(path)
        if any(part.children()):
            self._note("output", output[0] if isinstance(output, tuple) else output, path)
        elif isinstance(output, tuple) and len(output) == 2:
            for each, table in zip(("cos", "sin"), output, strict=True):
                if torch.is_grad_enabled() and not table.requires_grad:
                    table.requires_grad_()  # made without a history, but what they lead to shall be known
                self._note(each, table, path)
        else:
            self._note(SHORT.get(name, name), output, owner)

    def _rotated(self, args: tuple[Any, ...], kwargs: dict[str, Any], pair: tuple[Tensor, Tensor]) -> None:
        for name, value in zip(("q", "k"), pair, strict=True):
            self._note(f"{name} after rotation", value, self._running[-1], axis=2)

    def _cached(self, of: str, args: tuple[Any, ...], kwargs: dict[str, Any], held: tuple[Tensor, Tensor]) -> None:
        layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[2]
        for name, kind, value in zip(("k", "v"), ("keys", "values"), held, strict=True):
            self._note(
                f"cached {name}", value, self._running[-1], axis=2, cached=True, result=f"layer {layer} {of}{kind}"
            )

    def _attended(self, scores: Tensor, weights: Tensor) -> None:
        if scores.ndim >= 4:  # over the keys of every head; a router's has fewer axes
            self._attending = self._running[-1]
            self._note("scores", scores, self._attending, axis=2)
            self._note("weights", weights, self._attending, axis=2)


def _computes(part: nn.Module) -> bool:
    """Whether a module has weights itself, so that what enters it is formed by every implementation."""
    return any(True for _ in part.parameters(recurse=False))


def _split(path: str) -> tuple[str, str]:
    owner, _, name = path.rpartition(".")
    return owner, name


class _OnSoftmax(TorchFunctionMode):
    """Tells what goes into and comes out of every softmax."""

    def __init__(self, tell: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX:
            self._tell(args[0], result)
        return result


@contextmanager
def _after(owner: Any, name: str, tell: Callable[[tuple[Any, ...], dict[str, Any], Any], None]) -> Iterator[None]:
    """Tell of every call of a function, as long as the context lasts."""
    original, own = getattr(owner, name), name in vars(owner)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tell(args, kwargs, result)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
