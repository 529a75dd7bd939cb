"""How a candidate is called with what the reference was called with.

A drop-in needs nothing. For any other module write a function `call(module, recorded) -> output, cache`, or subclass
`Adapter` where it is also built in another way, or where its weights have other names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parity.check import tree

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass
class Recorded:
    """One call of the reference, in the dtype of the candidate.

    Attributes:
        args, kwargs: what its forward was called with.
        names: what the parameters of its forward are called, in order; `recorded[name]` finds an argument by its name.
        config: the reference's configuration.
        layer_idx: which layer of the model it is, where that is known.
        step: 0 for the prefill, then one more for every chunk of the same text.
        cache: the cache that the call is given, with what the candidate left there in earlier steps; None without one.
        state: empty at step 0, then whatever the adapter put there: a place for a cache of the candidate's own.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Sequence[str]
    config: Any
    layer_idx: int | None
    step: int
    dtype: torch.dtype
    cache: Any = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self.names, self.args, strict=False)) | dict(self.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def x(self) -> Tensor:
        """The first tensor: hidden states [rows, tokens, width], or ids [rows, tokens] for a whole model."""
        return next(value for value in self.arguments.values() if isinstance(value, Tensor))

    @property
    def cos(self) -> Tensor:
        """The cosines of the rotary table, [rows, tokens, rotary width]."""
        return self["position_embeddings"][0]

    @property
    def sin(self) -> Tensor:
        """The sines of the rotary table, [rows, tokens, rotary width]."""
        return self["position_embeddings"][1]

    @property
    def past(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of earlier tokens, as the reference has them: one pair, or one for each layer of a model."""
        held = own_layer(tree.remembered((self.args, dict(self.kwargs))), self.layer_idx)
        tensors = list(held.values())
        return list(zip(tensors[::2], tensors[1::2], strict=False))

    @property
    def may_attend(self) -> Tensor | None:
        """Which query may see which key, boolean [rows or 1, 1, queries, keys]; None where the call has no mask."""
        mask = self.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim < 4 or mask.dtype is torch.bool:
            return mask
        return mask > torch.finfo(mask.dtype).min / 2


@dataclass(frozen=True)
class Constructed:
    """What the reference is constructed with: its arguments, the configuration among them, and which layer it is."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    config: Any
    layer_idx: int | None


def own_layer(held: Mapping[str, Tensor], layer_idx: int | None) -> dict[str, Tensor]:
    """Of what a cache holds, by name, that of one layer, or all of it."""
    return {name: value for name, value in held.items() if layer_idx is None or name.startswith(f"layer {layer_idx} ")}


class Adapter:
    """How your module is built, called and read; override what differs from the reference.

    `rules` lead from the reference's tensors to yours where names or shapes differ, see `parity.check.weights`.
    """

    rules: Any = ()
    lift = True
    """Whether requests for float32 inside the module become float64 in a float64 run, as in the reference's own."""

    def build(self, cls: Any, constructed: Constructed) -> nn.Module:
        """Your module, from what the reference is constructed with."""
        return cls(*constructed.args, **constructed.kwargs)

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        """Run it: (output, cache). The cache may be one of transformers, a pair (keys, values) for each layer, or None.

        The output is a tensor, or a tuple of all that the reference returns.
        """
        return module(*recorded.args, **recorded.kwargs), recorded.cache


class DoesNotFit(Exception):
    """A forward that cannot be called with the reference's arguments."""


class DropIn(Adapter):
    """A class with the reference's constructor and forward; what its forward does not take is left out, and said."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        args, kwargs = self._fitting(module, recorded)
        try:
            inspect.signature(module.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise DoesNotFit(f"forward{inspect.signature(module.forward)}: {error}") from None
        return module(*args, **kwargs), recorded.cache

    def _fitting(self, module: nn.Module, recorded: Recorded) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parameters = inspect.signature(module.forward).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return recorded.args, self._renamed(parameters, recorded.kwargs)
        kwargs = self._renamed(parameters, recorded.kwargs)
        self.left_out |= {name for name in kwargs.keys() - parameters.keys() if not _says_nothing(kwargs[name])}
        if kwargs and not recorded.args and next(iter(kwargs)) not in parameters:
            raise DoesNotFit(f"forward{inspect.signature(module.forward)} takes no {next(iter(kwargs))}")
        return recorded.args, {name: value for name, value in kwargs.items() if name in parameters}

    def _renamed(self, parameters: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The cache under the name that the candidate has for it, as it differs between versions of transformers."""
        own = next((name for name in CACHE_NAMES if name in parameters), None)
        return {own if own and name in CACHE_NAMES else name: value for name, value in kwargs.items()}


def _says_nothing(value: Any) -> bool:
    return value is None or isinstance(value, bool)


class Function(Adapter):
    """An adapter that is one function, `call(module, recorded) -> output, cache`."""

    def __init__(self, function: Callable[[nn.Module, Recorded], Any]) -> None:
        self._function = function

    def call(self, module: nn.Module, recorded: Recorded) -> Any:
        return self._function(module, recorded)
