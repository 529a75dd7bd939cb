"""Hypothesis strategies that draw scenarios. Few draws each, since a draw costs as much as a small forward."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from parity.family import Family, Kind, Layer
from parity.scenario import DTYPES, AxisValue, Scenario

LONGEST = 12  # tokens of a row: past the windows of the tiny configurations, short enough for a dispatch-bound forward
WIDEST = 6  # pixels of an image, in height too
STACK = 48  # cases of one call, as a call of a tiny layer costs hardly more with many rows; see `make bench`
SEEDS = st.integers(0, 2**16 - 1)


@dataclass(frozen=True)
class Pool:
    """What a run draws from.

    Attributes:
        dtypes: the dtypes of every scenario.
        seed: another seed, other configurations.
        size: how many. A run draws few configurations and many cases of each, as building modules costs more than
            calling them.
        stack: cases of one call, where it is not what the property wants.
    """

    dtypes: tuple[str, ...] = tuple(DTYPES)
    seed: int = 0
    size: int = 8
    stack: int | None = None


def examples(source: SearchStrategy[Scenario], count: int, seed: int) -> list[Scenario]:
    """At most so many scenarios, the same for the same seed, for whoever does not look for the first failure."""
    drawn: list[Scenario] = []

    def note(scenario: Scenario) -> None:
        drawn.append(scenario)

    quiet = settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    hypothesis_seed(seed)(quiet(given(source)(note)))()
    return drawn


Point = tuple[tuple[str, AxisValue], ...]


def points(family: Family, layer: Layer, pool: Pool) -> list[Point]:
    """Points of the configuration space, along the axes that matter to a layer, as what differs from the first choices.

    The first point is the simplest. Over the others every axis goes through its choices again and again, each time in
    another order, so that each choice appears in as few configurations as it can.
    """
    shuffled = Random(f"{pool.seed} {family.model_type} {layer.name}")
    axes = [family.axis(name) for name in layer.axes]
    columns = [[(axis.name, choice) for choice in _rounds(shuffled, axis.choices, pool.size - 1)] for axis in axes]
    simplest = {axis.name: axis.choices[0] for axis in axes}
    rows = zip(*columns, strict=True)
    return [(), *(tuple((name, value) for name, value in row if simplest[name] != value) for row in rows)]


def configs(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Point]:
    """One of the points."""
    return st.sampled_from(points(family, layer, pool))


def _rounds(random: Random, choices: tuple[AxisValue, ...], count: int) -> list[AxisValue]:
    rounds = [random.sample(choices, len(choices)) for _ in range(-(-count // len(choices)))]
    return [choice for each in rounds for choice in each][:count]


def schedules(longest: int = LONGEST) -> SearchStrategy[tuple[int, ...]]:
    """Splits of a row into chunks: a prefill, then decoding steps or further chunks."""
    decoding = st.tuples(st.integers(1, longest - 3), st.integers(0, 3)).map(lambda p: (p[0], *[1] * p[1]))
    chunks = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
    return st.one_of(decoding, chunks)


def accepted(layer: Layer) -> SearchStrategy[tuple[int, ...]]:
    """Those that the reference takes itself: one chunk for a layer without memory, else any that it says."""
    if not (layer.kind.attends and layer.causal and layer.caches):
        return st.integers(1, LONGEST).map(lambda n: (n,))
    if layer.fewest == 1 and layer.most is None:
        return schedules()
    first = st.integers(layer.fewest, LONGEST - 3)
    later = st.lists(st.integers(layer.fewest, layer.most or 3), max_size=3 if layer.most else 1)
    return st.tuples(first, later).map(lambda chunks: (chunks[0], *chunks[1]))


@st.composite
def scenarios(
    draw: DrawFn,
    family: Family,
    layer: Layer,
    pool: Pool,
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
        packed: whether rows may hold several documents, in one chunk, as more are the gap packed-cache.
        far: whether the first position may be other than 0.
    """
    fields: dict[str, Any] = {"config": draw(configs(family, layer, pool)), "dtypes": pool.dtypes}
    fields["stack"] = pool.stack or stack
    if layer.kind is Kind.IMAGE:
        fields["columns"] = columns = draw(st.integers(1, WIDEST))
        schedule = st.integers(1, WIDEST).map(lambda height: (height * columns,))
    if family.tokens is not None:
        schedule = st.just((family.tokens(family.point(layer, dict(fields["config"]))),))
    if schedule is None:
        schedule = accepted(layer)
    fields["schedule"] = chunks = draw(schedule)
    fields["batch"] = batch = draw(st.integers(1, 3))
    fields["scale"] = draw(st.sampled_from(layer.scales))
    fields["seed"] = draw(SEEDS)
    length = sum(chunks)
    fields |= draw(memories(family, layer, fields["config"], batch))
    fields["typed"] = family.token_types is not None and layer.kind.reads_ids and draw(st.booleans())
    packed, far = packed and layer.packs and len(chunks) == 1, far and not (layer.recurrent or layer.counts)
    shape = draw(st.sampled_from(_shapes(layer.kind, padded and layer.masks, packed, far)))
    if shape == "padded" and length > 1:
        fields["side"] = draw(st.sampled_from(("left", "right", "inner")))
        fields["padding"] = tuple(draw(st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch)))
        fields["masked_positions"] = not (layer.recurrent or layer.counts) and draw(st.booleans())
    elif shape == "packed" and length > 1:
        cut = draw(st.integers(1, length - 1))
        fields["packing"] = (cut, length - cut)
    elif shape == "offset":
        fields["offset"] = draw(st.sampled_from(_offsets(family.positions, length)))
    return Scenario(**fields)


@st.composite
def memories(
    draw: DrawFn, family: Family, layer: Layer, config: tuple[tuple[str, AxisValue], ...], batch: int
) -> dict[str, Any]:
    """The memory of a scenario, where a layer attends to one; those that can go without also do."""
    if not family.has_memory(layer, dict(config)):
        return {}
    size = draw(st.sampled_from((3, 1, 5) if layer.must_remember else (3, 1, 5, 0)))
    padding = st.lists(st.integers(0, size - 1), min_size=batch, max_size=batch).map(tuple)
    return {"memory": size, "memory_padding": draw(padding) if size else ()}


def _shapes(kind: Kind, padded: bool, packed: bool, far: bool) -> tuple[str, ...]:
    """What can be special about a row: nothing where its tokens do not see each other, but for what tells positions."""
    moved = ("plain", *["offset"] * far)
    if kind in (Kind.POINTWISE, Kind.CROSS, Kind.MIXER, Kind.IMAGE):
        return ("plain",)
    return (*moved, *["padded"] * padded, *["packed"] * packed) if kind.attends else moved


def _offsets(positions: int | None, length: int) -> tuple[int, ...]:
    """First positions: the second, one further on, some beyond every length that a rotary table is told of, or where
    positions are learned that from which the last there is is reached.
    """
    return (1, 40, 100, 3000) if positions is None else (1, positions // 2, positions - length)
