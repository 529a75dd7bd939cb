"""Hypothesis strategies that draw scenarios. Few draws each, since a draw costs as much as a small forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from parity.family import Family, Kind, Layer
from parity.scenario import DTYPES, AxisValue, Scenario

LONGEST = 12  # tokens of a row: past the windows of the tiny configurations, short enough for a dispatch-bound forward
STACK = 8  # cases of one call; see `make bench` for what it saves
SEEDS = st.integers(0, 2**16 - 1)


def configs(family: Family, layer: Layer) -> SearchStrategy[tuple[tuple[str, AxisValue], ...]]:
    """Points of the configuration space, along the axes that matter to a layer, as what differs from the first choices.

    One integer is drawn and read as mixed digits: a point costs one draw, and 0 is the simplest.
    """
    axes = [family.axis(name) for name in layer.axes]
    total = 1
    for axis in axes:
        total *= len(axis.choices)

    def point(number: int) -> tuple[tuple[str, AxisValue], ...]:
        chosen = []
        for axis in axes:
            number, digit = divmod(number, len(axis.choices))
            if digit:
                chosen.append((axis.name, axis.choices[digit]))
        return tuple(chosen)

    return st.integers(0, total - 1).map(point)


def schedules(longest: int = LONGEST) -> SearchStrategy[tuple[int, ...]]:
    """Splits of a row into chunks: a prefill, then decoding steps or further chunks."""
    decoding = st.tuples(st.integers(1, longest - 3), st.integers(0, 3)).map(lambda p: (p[0], *[1] * p[1]))
    chunks = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
    return st.one_of(decoding, chunks)


@st.composite
def scenarios(
    draw: DrawFn,
    family: Family,
    layer: Layer,
    dtypes: Sequence[str] = tuple(DTYPES),
    schedule: SearchStrategy[tuple[int, ...]] | None = None,
    padded: bool = True,
    packed: bool = False,
    far: bool = True,
    stack: int = STACK,
) -> Scenario:
    """Scenarios of one layer.

    Args:
        schedule: splits of a row; by default one chunk for a layer without memory, any split for the others.
        padded: whether rows may be padded, where the layer can tell.
        packed: whether rows may hold several documents, in one chunk.
        far: whether the first position may be other than 0.
    """
    attends = layer.kind.attends
    fields: dict[str, Any] = {"config": draw(configs(family, layer)), "dtypes": tuple(dtypes), "stack": stack}
    if schedule is None:
        schedule = schedules() if attends and family.causal else st.integers(1, LONGEST).map(lambda n: (n,))
    fields["schedule"] = chunks = draw(schedule)
    fields["batch"] = batch = draw(st.integers(1, 3))
    fields["scale"] = draw(st.sampled_from(layer.scales))
    fields["seed"] = draw(SEEDS)
    length = sum(chunks)
    shape = draw(st.sampled_from(_shapes(layer.kind, padded, packed and len(chunks) == 1, far)))
    if shape == "padded" and length > 1:
        fields["side"] = draw(st.sampled_from(("left", "right", "inner")))
        fields["padding"] = tuple(draw(st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch)))
        fields["masked_positions"] = draw(st.booleans())
    elif shape == "packed" and length > 1:
        cut = draw(st.integers(1, length - 1))
        fields["packing"] = (cut, length - cut)
    elif shape == "offset":
        fields["offset"] = draw(st.sampled_from((1, 40, 3000)))
    return Scenario(**fields)


def _shapes(kind: Kind, padded: bool, packed: bool, far: bool) -> tuple[str, ...]:
    """What can be special about a row: nothing for a layer that sees one token, positions for rotary tables."""
    moved = ("plain", *["offset"] * far)
    if not kind.attends:
        return moved if kind is Kind.ROTARY else ("plain",)
    return (*moved, *["padded"] * padded, *["packed"] * packed)
