"""What a family declares: its configuration space and its layers, each beside the class it must equal.

A family is one file in `parity/families`, named by its `model_type` and found because it is there. It holds a `FAMILY`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any

from torch import nn

from parity.scenario import AxisValue, ScenarioError
from reimpl.weights import Rule


class FamilyError(ValueError):
    """An unknown family, layer or axis."""


class Kind(Enum):
    """What a layer is called with, and what it returns; the same for every family."""

    POINTWISE = "pointwise"  # x -> output
    ROTARY = "rotary"  # x, positions -> cos, sin
    EMBEDDINGS = "embeddings"  # ids, positions, token types -> output
    ATTENTION = "attention"  # x, rotary tables, mask, cache, memory -> output
    CROSS = "cross"  # x, memory, cache -> output
    MIXER = "mixer"  # x -> output, in which tokens see each other
    RECURRENT = "recurrent"  # x, valid, cache of states -> output
    IMAGE = "image"  # image, [rows, channels, height, width] -> output
    MODEL = "model"  # ids, valid, positions, cache, token types, memory -> output, and a pooled vector per row

    @property
    def attends(self) -> bool:
        """Whether tokens see others, so that masks, caches and chunks mean something."""
        return self not in (Kind.POINTWISE, Kind.ROTARY, Kind.EMBEDDINGS)

    @property
    def reads_ids(self) -> bool:
        """Whether tokens come as ids; otherwise they come as hidden states."""
        return self in (Kind.EMBEDDINGS, Kind.MODEL)

    @property
    def results(self) -> tuple[str, ...]:
        """What the tensors are called that come out, in order; all but the first may be left out."""
        return ("cos", "sin") if self is Kind.ROTARY else ("output", "pooled")


@dataclass(frozen=True)
class Axis:
    """One direction of the configuration space. The first choice is the simplest; examples shrink towards it.

    What is `undrawn` can be asked for, but no example has it: the reference contradicts itself there.
    """

    name: str
    choices: tuple[AxisValue, ...]
    meaning: str
    undrawn: tuple[AxisValue, ...] = ()


Point = Mapping[str, AxisValue]


def _no_window(config: Any) -> int | None:
    return None


def _hidden_size(config: Any) -> int:
    return config.hidden_size


def _no_memory(point: Point) -> bool:
    return False


def _same_names(config: Any) -> Sequence[Rule]:
    return ()


@dataclass(frozen=True)
class Layer:
    """A candidate layer and its reference.

    Attributes:
        name: what a user calls it (`attention`).
        kind: how both sides are called.
        reference: the class in `transformers.models.<model_type>`, or in the family's library.
        candidate: builds our layer from our configuration.
        at: where its weights stand in a checkpoint (`model.layers.0.self_attn.`).
        axes: the axes of the family's space that matter to it.
        arguments: the reference's constructor arguments, where they are not `config` and `layer_idx`.
        scales: sizes of the inputs that are drawn. Layers without a norm at their entrance get no large ones: their
            scores would be so large that the reference itself is wrong by its own size.
        fixed: axes at which it has a choice of its own.
        index: which of the model's layers it is.
        width: the channels of what it is called with.
        window: the sliding window of this layer under a configuration.
        causal: whether a token sees only what came before it.
        caches: whether the reference has a cache; otherwise ours is held against its one pass over all tokens.
        counts: whether it counts positions itself, from 0 and padding too, and cannot be told them.
        needs_memory: whether it always attends to an encoder's memory.
        masks: whether it can be told which tokens are padding.
        packs: whether positions that begin anew separate documents, where no mask says so.
        generates: whether it continues a text, token by token.
        routes: whether it sends tokens to experts.
        apart: whether the reference's does more inside a model than by itself, as one that adds the residual, too.
        states: what is carried from chunk to chunk in place of keys and values, where it is a recurrence: a name for
            each tensor, in the order in which the reference has them; empty for those that this layer leaves alone.
        fewest: how many tokens the reference takes at once, at least, where it carries a state.
        most: how many it takes at once after its first chunk, at most.
        trains: whether the reference has gradients of the weights as they are on disk.
        left_out: the dtypes in which it cannot be held against the reference, each with the reason.
    """

    name: str
    kind: Kind
    reference: str
    candidate: Callable[[Any], nn.Module]
    at: str
    axes: tuple[str, ...]
    arguments: Callable[[Any], Mapping[str, Any]] | None = None
    scales: tuple[float, ...] = (1.0, 1e-3, 1e2)
    fixed: tuple[tuple[str, AxisValue], ...] = ()
    index: int = 0
    width: Callable[[Any], int] = _hidden_size
    window: Callable[[Any], int | None] = _no_window
    causal: bool = True
    caches: bool = True
    counts: bool = False
    needs_memory: bool = False
    masks: bool = True
    packs: bool = True
    generates: bool = False
    routes: bool = False
    apart: bool = False
    states: tuple[str, ...] = ()
    fewest: int = 1
    most: int | None = None
    trains: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    @property
    def recurrent(self) -> bool:
        """Whether it carries a state, and so knows no positions."""
        return bool(self.states)

    @property
    def must_remember(self) -> bool:
        """Whether there is always a memory that it attends to."""
        return self.needs_memory or self.kind is Kind.CROSS


@dataclass(frozen=True)
class Family:
    """All layers of one model type.

    Attributes:
        model_type: Hugging Face's name.
        axes: the configuration space; a point is one choice per axis.
        configure: turns a point into the keyword arguments of the Hugging Face configuration.
        config: our configuration class, read from the Hugging Face dictionary.
        layers: bottom up.
        library: where the references come from, as `parity/sources.py` knows it.
        tokens: how many a row has at a point of the space, where it has no other number.
        rotary: the reference's class of rotary tables, which the layers below the model are called with.
        alibi: the reference's function that makes what ALiBi adds to scores, which they are called with in its place.
        memory: whether layers attend to an encoder's memory at a point of the space.
        token_types: how many types of tokens a configuration tells apart, if any.
        positions: how many there are, where they are learned.
        turned: the projections whose rows are heads that turn as a whole, if any.
        rules: how names on disk become names in our whole model, where they differ.
        implementations: the reference's own ways to compute, as private fields of its configuration; the first one,
            unfused, is the one that the truth is taken from, all of them make the yardstick.
        exact: fields of the configuration that choose a precision only, as they are where the truth is taken from.
    """

    model_type: str
    axes: tuple[Axis, ...]
    configure: Callable[[Point], dict[str, Any]]
    config: Any
    layers: tuple[Layer, ...]
    library: str = "transformers"
    tokens: Callable[[Point], int] | None = None
    rotary: str | None = None
    alibi: str | None = None
    memory: Callable[[Point], bool] = _no_memory
    token_types: Callable[[Any], int] | None = None
    positions: int | None = None
    turned: tuple[str, ...] = ("q_proj", "k_proj")
    rules: Callable[[Any], Sequence[Rule]] = _same_names
    implementations: tuple[Mapping[str, Any], ...] = (
        {"_attn_implementation": "eager"},
        {"_attn_implementation": "sdpa"},
    )
    exact: Mapping[str, Any] = field(default_factory=dict)

    def has_memory(self, layer: Layer, values: Point) -> bool:
        """Whether a layer can attend to an encoder's memory at a point of the space."""
        return layer.must_remember or self.memory(self.point(layer, values))

    def axis(self, name: str) -> Axis:
        """The axis of that name.

        Raises:
            FamilyError: naming the axes there are.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise FamilyError(
            f"{self.model_type} has no configuration axis {name!r}{_suggest(name, [a.name for a in self.axes])}"
        )

    def layer(self, name: str) -> Layer:
        """The layer of that name, or of that reference class.

        Raises:
            FamilyError: naming the layers there are.
        """
        for layer in self.layers:
            if name in (layer.name, layer.reference):
                return layer
        raise FamilyError(f"{self.model_type} has no layer {name!r}{_suggest(name, [a.name for a in self.layers])}")

    def point(self, layer: Layer, values: Point) -> dict[str, AxisValue]:
        """A full point of a layer's space: its fixed choices, the values given, the first choice of every other axis.

        Raises:
            FamilyError: for an axis that the family does not have.
            ScenarioError: for a value that is not among an axis's choices.
        """
        values = {**dict(layer.fixed), **values}
        for name, value in values.items():
            axis = self.axis(name)
            choices = axis.choices + axis.undrawn
            if value not in choices:
                listed = ", ".join(map(str, choices))
                raise ScenarioError(f"{name}={value} is not among the choices of {self.model_type}: {listed}")
        return {axis.name: values.get(axis.name, axis.choices[0]) for axis in self.axes}


def _suggest(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    nearest = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{nearest} known are {', '.join(known)}"


def names() -> list[str]:
    """The model types there are families for."""
    import parity.families

    return sorted(module.name for module in pkgutil.iter_modules(parity.families.__path__))


@cache
def load(model_type: str) -> Family:
    """The family of a model type.

    Raises:
        FamilyError: naming the known model types and the nearest.
    """
    if model_type not in names():
        raise FamilyError(f"unknown model type {model_type!r}{_suggest(model_type, names())}")
    return importlib.import_module(f"parity.families.{model_type}").FAMILY
