"""Our layers beside the reference's: time, error, memory of a step, and the bytes that a cache holds.

A row is a layer with work to do in a dtype: a prefill, or one token after some that are cached. Ours and every
implementation of the reference do it in turn. A row that falls short of its bars on time is measured again at length,
as the machine may have been busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

import torch

from parity import family as families
from parity.bench import realistic
from parity.bench.arena import EAGER, OURS, Arena
from parity.bench.bars import Bar
from parity.bench.contest import contest, ratios
from parity.bench.memory import extra_memory
from parity.family import Family, FamilyError, Kind, Layer
from parity.scenario import DTYPE_NAMES, DTYPES, ScenarioError

REPEATS, QUICK = (7, 21), (3, 7)
"""How often to measure, and how often if that falls short of a bar."""

MEASURED = ("f32", "bf16")
SDPA = "sdpa"
PARITY = 1 / 1.05
"""No layer may take 5 % longer than the faster implementation of the reference."""


@dataclass(frozen=True)
class Work:
    """What a layer is called with: so many new tokens, after so many that are cached, in each of some rows."""

    tokens: int
    cached: int = 0
    rows: int = 1

    def __str__(self) -> str:
        if self.tokens > 1:
            return f"prefill {self.tokens:,}"
        if not self.cached:
            return "one token"
        return f"decode {f'{self.rows} rows ' if self.rows > 1 else ''}at {self.cached:,}"


PREFILLS = (Work(512), Work(2048))
DECODES = (Work(1, 128), Work(1, 1024), Work(1, 4096))
ONE = Work(1)
SERVED = Work(1, 4096, rows=4)
"""As a server decodes, several texts at once; for a single one, both sides spend most of a step on reading weights."""


@dataclass(frozen=True)
class Row:
    """A layer with its work, in a dtype.

    Attributes:
        sizes: what differs from the realistic sizes of its family.
        title: what these sizes are called.
    """

    family: Family
    layer: Layer
    work: Work
    dtype: str
    sizes: tuple[tuple[str, Any], ...] = ()
    title: str = ""

    def __str__(self) -> str:
        size = f" ({self.title})" if self.title else ""
        return f"{self.family.model_type} {self.layer.name}{size}, {self.work}, {self.dtype}"


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        seconds: of our forward.
        ratios: how many times as long each implementation of the reference takes.
        error: our largest error against the float64 truth, in units of the eager reference's.
        numbers: how many are cached for a token; 0 without a growing cache.
        spare: bytes of our cache beyond what its capacity needs, after a step.
        extra: bytes that our step needed beside the cache and the weights; None where it was not asked for.
    """

    row: Row
    seconds: float
    ratios: Mapping[str, float]
    error: float
    numbers: int = 0
    spare: int = 0
    extra: int | None = None

    def bars(self) -> Iterator[Bar]:
        """What was measured, beside its bars."""
        yield Bar(f"{self.row}: the faster reference", min(self.ratios.values()), "times ours", least=PARITY)
        for goal in GOALS:
            if goal.applies(self.row) and goal.against in self.ratios:
                yield Bar(f"{self.row}: {goal.against}", self.ratios[goal.against], "times ours", least=goal.least)
        yield Bar(f"{self.row}: largest error", self.error, "times eager's", most=2)
        if self.numbers:
            yield Bar(f"{self.row}: cache beyond {self.numbers} numbers per token", self.spare, "bytes", most=0)
        if self.extra is not None:
            yield Bar(f"{self.row}: extra memory", self.extra / 2**20, "MiB", most=32)

    @property
    def line(self) -> str:
        """What is printed: the row, and whether its bars hold."""
        times = "  ".join(f"{name} {ratio:5.2f}" for name, ratio in self.ratios.items())
        extra = "" if self.extra is None else f"  extra memory {self.extra / 2**20:.1f} MiB"
        mark = "[green]holds[/green]" if all(bar.holds for bar in self.bars()) else "[red]FAILS[/red]"
        return f"{self.row!s:60} {self.seconds * 1e3:9.3f} ms  error {self.error:4.2f}  {times}{extra}  {mark}"

    def record(self) -> dict[str, Any]:
        """What is written."""
        return {"row": str(self.row), "milliseconds": self.seconds * 1e3, "ratios": dict(self.ratios)}

    @property
    def fast(self) -> bool:
        """Whether the bars on time hold."""
        return all(bar.holds for bar in self.bars() if bar.unit == "times ours")


HEADER = "our layers: CPU time of ours, our largest error over eager's, and how many times as long the reference takes"


@dataclass(frozen=True)
class Goal:
    """A lead over one implementation of the reference that some rows must have."""

    applies: Callable[[Row], bool]
    against: str
    least: float


def _long_grouped(row: Row) -> bool:
    fields = row.family.configure(row.family.point(row.layer, {}))
    grouped = "kv_lora_rank" not in fields and "num_key_value_heads" in fields
    return grouped and row.work == SERVED and row.dtype == "f32"


def _long_latent(row: Row) -> bool:
    return bool(row.title) and row.work == DECODES[-1]


def _long_latent_in(dtype: str, row: Row) -> bool:
    return _long_latent(row) and row.dtype == dtype


def _one_of_many_experts(row: Row) -> bool:
    return row.layer.routes and row.work == ONE


GOALS = (
    Goal(_long_grouped, EAGER, 3.3),
    Goal(_long_grouped, SDPA, 1.5),
    Goal(partial(_long_latent_in, "f32"), EAGER, 20),
    Goal(partial(_long_latent_in, "bf16"), EAGER, 10),
    Goal(_one_of_many_experts, EAGER, 1.15),
)


def rows(models: Sequence[str], layers: Sequence[str], dtypes: Sequence[str] = (), quick: bool = False) -> list[Row]:
    """Every layer below the whole models, with all its work; where it is to be quick, without the long prefill.

    Families without a reference but the formulas of a paper are left out: a formula has no speed to be held to.

    Raises:
        FamilyError: for a model that is not known, or where no layer has one of the names.
        ScenarioError: for a dtype in which layers are not measured.
    """
    if others := [name for name in dtypes if DTYPE_NAMES.get(name) not in MEASURED]:
        raise ScenarioError(f"layers are measured in float32 and bfloat16, not in {', '.join(others)}")
    measured = tuple(dict.fromkeys(DTYPE_NAMES[name] for name in dtypes)) or MEASURED
    chosen = [families.load(model) for model in models or families.names()]
    if missing := set(layers) - {name for family in chosen for each in family.layers for name in _names(each)}:
        raise FamilyError(f"no family has a layer {', '.join(map(repr, sorted(missing)))}; see `parity list`")
    return [
        row
        for family in chosen
        for layer in family.layers
        if family.tokens is None and (not layers or set(_names(layer)) & set(layers))
        for dtype in measured
        for row in _rows(family, layer, dtype)
        if not (quick and row.work == PREFILLS[-1])
    ]


def _names(layer: Layer) -> tuple[str, str]:
    return layer.name, layer.reference


def _rows(family: Family, layer: Layer, dtype: str) -> Iterator[Row]:
    if layer.kind is Kind.MODEL:
        return
    for work in (*PREFILLS, *_short(layer)):
        yield Row(family, layer, work, dtype)
    if layer.name != "attention":
        return
    if SERVED.cached in [work.cached for work in _short(layer)]:
        yield Row(family, layer, SERVED, dtype)
    if "kv_lora_rank" in family.configure(family.point(layer, {})):
        for work in DECODES:
            yield Row(family, layer, work, dtype, tuple(realistic.FULL.items()), "full size")


def _short(layer: Layer) -> Sequence[Work]:
    """One token: after others where these are cached. What sees the tokens behind it has them all at once."""
    if not layer.kind.attends or layer.recurrent:
        return (ONE,)
    return DECODES if layer.causal and layer.caches and not layer.counts else ()


def measure(chosen: Sequence[Row], quick: bool = False) -> Iterator[Result]:
    """The rows' results, as they come. Rows of one layer in one dtype share their modules."""
    repeats = QUICK if quick else REPEATS
    with torch.no_grad():
        for (layer, sizes, dtype), of_arena in groupby(chosen, lambda row: (row.layer, row.sizes, row.dtype)):
            several = list(of_arena)
            arena = Arena(realistic.pair(several[0].family, layer, dict(sizes)), DTYPES[dtype])
            for row in several:
                yield _measure(arena, row, repeats)


def _measure(arena: Arena, row: Row, repeats: Sequence[int]) -> Result:
    bout = arena.enter(row.work.tokens, row.work.cached, row.work.rows)
    extra = extra_memory(bout.contestants[0].prepare()) if _long_latent(row) else None
    error = bout.error()
    numbers, spare = (bout.numbers, bout.spare()) if bout.grows else (0, 0)
    for times in repeats:
        seconds = contest(bout.contestants, times)
        result = Result(row, median(seconds[OURS]), ratios(seconds, OURS), error, numbers, spare, extra)
        if result.fast:
            break
    return result
