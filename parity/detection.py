"""Whether the ordinary runs of a family catch a mistake: after how many scenarios, in which verdict, by how much.

The scenarios are those that `parity run` draws, none is picked by hand. Each judges several dtypes at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from parity import family as families
from parity import gaps
from parity import property as properties
from parity.compare import Judgement, worst
from parity.family import Family, Layer
from parity.mismatch import MEASURED
from parity.mistakes.mistake import Mistake
from parity.pair import forward, pair_of, run_candidate
from parity.property import Property
from parity.runner import Enough, draw, judged
from parity.scenario import DTYPES, Scenario, parse_scenario
from parity.usual import usual_checks

WIDE = 100  # times the allowance, by which a mistake must be seen under its trigger
WIDELY = ("f64", "f32")  # the dtypes in which every mistake must be caught
EXAMPLES = 160  # scenarios at most until a mistake must have been caught


@dataclass(frozen=True)
class Shown:
    """The error of a scenario, by the judgement furthest beyond its allowance; all but `times` relative."""

    verdict: str
    error: float
    allowed: float
    times: float


@dataclass(frozen=True)
class Catch:
    """The first scenario that shows a mistake in a dtype: its number, and the verdict furthest beyond its allowance."""

    after: int
    verdict: str
    times: float
    scenario: str


@dataclass(frozen=True)
class Detection:
    """What the runs of a family say of a mistake.

    Attributes:
        mistake, kind: its name, and what kind it is.
        model, layer: where it was made.
        shown: by dtype, the error in the scenario that must show it.
        caught: by dtype, the first catch; a dtype in which nothing was caught has none.
        nearest: by dtype in which nothing was caught, the largest error, in allowances, of all that were drawn.
        unchanged: the dtypes among these in which the layer gives the very numbers that it gives without the mistake,
            in the scenario that must show it.
        dtypes: those it was looked for in.
        usual: what the usual checks say of it, True where they find nothing.
        seconds: CPU time.
    """

    mistake: str
    kind: str
    model: str
    layer: str
    dtypes: tuple[str, ...]
    shown: dict[str, Shown] = field(default_factory=dict)
    caught: dict[str, Catch] = field(default_factory=dict)
    nearest: dict[str, Shown] = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()
    usual: dict[str, bool] = field(default_factory=dict)
    seconds: float = 0.0


def detect(
    mistake: Mistake, model_type: str, examples: int = EXAMPLES, seed: int = 0, dtypes: Sequence[str] = tuple(DTYPES)
) -> Detection:
    """Make a mistake in the lowest layer of a family that can make it, and look for it in those dtypes it shows in."""
    start, family = time.process_time(), families.load(model_type)
    layer, prop = family.layer(mistake.where[model_type][0]), properties.find(mistake.prop)
    dtypes = tuple(name for name in prop.dtypes if name in dtypes and _shows_in(mistake, name))
    with mistake.planted():
        shown = _shown(mistake, family, layer, prop, dtypes)
        caught, nearest = _caught(family, layer, prop, dtypes, examples, seed)
        usual = _usual(mistake, family, layer)
    return Detection(
        mistake.name,
        mistake.kind,
        model_type,
        layer.name,
        dtypes,
        shown,
        caught,
        nearest,
        tuple(name for name in nearest if _is_unchanged(mistake, family, layer, prop, name)),
        usual,
        time.process_time() - start,
    )


def _shows_in(mistake: Mistake, dtype: str) -> bool:
    """A mistake of precision shows in no finer dtype than it is of; float16 is left to those of its own."""
    if mistake.dtype != "f64":
        return dtype == mistake.dtype
    return dtype != "f16"


def _shown(mistake: Mistake, family: Family, layer: Layer, prop: Property, dtypes: Sequence[str]) -> dict[str, Shown]:
    """The error in the scenario under which the mistake must show."""
    scenario = replace(parse_scenario(mistake.place(family.model_type).shows), dtypes=tuple(dtypes))
    judgements, _ = judged(prop, family, layer, scenario)
    if judgements is None:
        return {name: Shown("raises", math.inf, 0.0, math.inf) for name in dtypes}
    return _largest(judgements, dtypes)


def _largest(judgements: Sequence[Judgement], dtypes: Sequence[str]) -> dict[str, Shown]:
    """The judgement furthest beyond its allowance, or nearest to it, of every dtype."""
    found = ((name, worst(each for each in judgements if each.dtype == name)) for name in dtypes)
    return {name: Shown(j.quantity.verdict, j.error, j.allowed, j.ratio) for name, j in found if j is not None}


def _is_unchanged(mistake: Mistake, family: Family, layer: Layer, prop: Property, dtype: str) -> bool:
    """Whether a mistake changes not one number of a dtype where it must show: what it rounds is rounded anyway."""
    scenario = parse_scenario(mistake.place(family.model_type).shows).only(dtype)
    pair = pair_of(family.model_type, layer.name, scenario.config)
    case = prop.case(pair, scenario)
    with mistake.planted():
        wrong = run_candidate(pair, case, forward, DTYPES[dtype])
    right = run_candidate(pair, case, forward, DTYPES[dtype])
    return all(map(torch.equal, wrong.values, right.values))


def _caught(
    family: Family, layer: Layer, prop: Property, dtypes: tuple[str, ...], examples: int, seed: int
) -> tuple[dict[str, Catch], dict[str, Shown]]:
    """The first catch in every dtype, and of the dtypes without one the largest error that was drawn."""
    caught: dict[str, Catch] = {}
    nearest: dict[str, Shown] = {}
    drawn = 0

    def look(scenario: Scenario) -> None:
        nonlocal drawn
        left = tuple(name for name in dtypes if name not in caught)
        if not left:
            raise Enough
        drawn += 1
        found, largest = _catches(prop, family, layer, replace(scenario, dtypes=left), drawn)
        caught.update(found)
        for name, shown in largest.items():
            nearest[name] = max(shown, nearest.get(name, shown), key=lambda each: each.times)

    with suppress(Enough):
        draw(prop, family, layer, dtypes, look, examples=examples, seed=seed, shrink=False)
    return caught, {name: shown for name, shown in nearest.items() if name not in caught}


def _catches(
    prop: Property, family: Family, layer: Layer, scenario: Scenario, number: int
) -> tuple[dict[str, Catch], dict[str, Shown]]:
    """What one scenario shows, by dtype, and the largest errors that are distances from the truth."""
    judgements, mismatch = judged(prop, family, layer, scenario)
    if mismatch is not None and gaps.at(mismatch.place):
        return {}, {}
    if judgements is None:
        return {name: Catch(number, "raises", math.inf, str(scenario)) for name in scenario.dtypes}, {}
    largest = _largest([each for each in judgements if each.quantity.verdict in MEASURED], scenario.dtypes)
    if mismatch is None:
        return {}, largest
    catches = {}
    for name in scenario.dtypes:
        if failed := worst(each for each in mismatch.failed if each.dtype == name):
            catches[name] = Catch(number, failed.quantity.verdict, failed.ratio, str(scenario.only(name)))
    return catches, largest


def _usual(mistake: Mistake, family: Family, layer: Layer) -> dict[str, bool]:
    """What the usual checks say of the layer, and of the whole model where it generates."""
    scenario = parse_scenario(mistake.place(family.model_type).shows)
    said: dict[str, bool] = {}
    for each in (layer, *(top for top in family.layers if top.generates and top is not layer)):
        config = tuple((name, value) for name, value in scenario.config if name in each.axes)
        found = usual_checks(pair_of(family.model_type, each.name, config), replace(scenario, config=config))
        said = found | said
    return said
