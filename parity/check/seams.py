"""Making a mistake in the reference itself: what its modules share by name is exchanged as long as a context lasts.

Nothing is known of a model type but what names say: functions of its module such as `apply_rotary_pos_emb`, what their
parameters are called, and classes such as those of rotary embeddings. A seam that a model lacks is no place for a
mistake there.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

MODELS = "transformers.models."
Function = Callable[..., Any]
Given = dict[str, Any]
"""The arguments of a call, by the names of the parameters."""


class Moment(Protocol):
    """Where in its text a run of the reference is: in which step, after how many tokens of earlier steps."""

    step: int
    seen: int


Wrap = Callable[[Function, Moment], Function]


@dataclass(frozen=True)
class Slip:
    """A mistake that can be made in any reference which has the seam.

    Attributes:
        name: what a layer then does, as the catalogue calls it where it has it, too.
        places: of a module, the owners and names of what is exchanged.
        wrap: makes the function that takes the place of one.
        tables: whether what the whole model computes of positions alone is another then, too.
    """

    name: str
    places: Callable[[nn.Module], Iterator[tuple[Any, str]]]
    wrap: Wrap
    tables: bool = False

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def made(self, module: nn.Module, moment: Moment) -> Iterator[bool]:
        """The mistake is made in a module as long as the context lasts; gives whether there is a place for it."""
        with ExitStack() as stack:
            there = list(self.places(module))
            for owner, name in there:
                stack.enter_context(patch.object(owner, name, self.wrap(getattr(owner, name), moment)))
            yield bool(there)


def functions(pattern: str, *parameters: str) -> Callable[[nn.Module], Iterator[tuple[Any, str]]]:
    """Functions of such a name with such parameters, in the modules in which the layers of a model are written."""

    def places(module: nn.Module) -> Iterator[tuple[Any, str]]:
        for space in _spaces(module):
            for name, value in list(vars(space).items()):
                if re.fullmatch(pattern, name) and inspect.isfunction(value) and _takes(value, parameters):
                    yield space, name

    return places


def forwards(pattern: str, *parameters: str) -> Callable[[nn.Module], Iterator[tuple[Any, str]]]:
    """The forward of every class of such a name among the parts of a model."""

    def places(module: nn.Module) -> Iterator[tuple[Any, str]]:
        for cls in dict.fromkeys(base for part in module.modules() for base in type(part).__mro__):
            if re.search(pattern, cls.__name__) and _is_theirs(cls) and _takes(vars(cls).get("forward"), parameters):
                yield cls, "forward"

    return places


def attributes(*names: str) -> Callable[[nn.Module], Iterator[tuple[Any, str]]]:
    """What the parts of a module keep under such names."""

    def places(module: nn.Module) -> Iterator[tuple[Any, str]]:
        for part in module.modules():
            yield from ((part, name) for name in names if hasattr(part, name))

    return places


def _spaces(module: nn.Module) -> list[Any]:
    """The modules in which the parts of a model are written, and those that share their functions with them."""
    found = dict.fromkeys(type(part).__module__ for part in module.modules() if _is_theirs(type(part)))
    for name in list(found):
        shared = (value.__module__ for value in vars(sys.modules[name]).values() if inspect.isfunction(value))
        found |= dict.fromkeys(each for each in shared if each.startswith(MODELS))
    return [sys.modules[name] for name in found]


def _is_theirs(cls: type) -> bool:
    return cls.__module__.startswith(MODELS)


def _takes(function: Function | None, parameters: Sequence[str]) -> bool:
    return function is not None and set(parameters) <= set(inspect.signature(function).parameters)


def given(change: Callable[[Given, Moment], Given]) -> Wrap:
    """A function that is given other arguments: those in which `change` differs."""

    def wrap(original: Function, moment: Moment) -> Function:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments.update(change(bound.arguments, moment))
            return original(*bound.args, **bound.kwargs)

        return call

    return wrap


def computed(compute: Callable[[Function, Given], Any]) -> Wrap:
    """A function that computes something else: `compute` gets the one whose place it takes, and the arguments."""

    def wrap(original: Function, moment: Moment) -> Function:
        signature = inspect.signature(original)

        def plain(arguments: Given) -> Any:
            bound = inspect.BoundArguments(signature, arguments)
            return original(*bound.args, **bound.kwargs)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return compute(plain, dict(bound.arguments))

        return call

    return wrap


def replaced(value: Callable[[Any], Any]) -> Wrap:
    """Another value in the place of one."""
    return lambda original, moment: value(original)


def remasked(change: Callable[[Tensor, Moment], Tensor | None]) -> Wrap:
    """Attention under another mask.

    Args:
        change: of which query may see which key, boolean [rows or 1, heads or 1, queries, keys]; None: all may.
    """

    def other(arguments: Given, moment: Moment) -> Given:
        mask, query, key = (arguments[name] for name in ("attention_mask", "query", "key"))
        allowed = seen_by(mask, query.shape[-2], key.shape[-2])
        changed = change(allowed, moment)
        if changed is None or mask is None or mask.dtype is torch.bool:
            return {"attention_mask": changed}
        lowest = torch.finfo(mask.dtype).min
        return {"attention_mask": torch.where(changed, mask.where(allowed, 0.0), lowest)}

    return given(other)


def seen_by(mask: Tensor | None, queries: int, keys: int) -> Tensor:
    """Which query may see which key, boolean [rows or 1, heads or 1, queries, keys]."""
    if mask is None:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool)
    mask = mask[..., :keys]
    return mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
