"""How far a diagnosis can be trusted: mistakes made by second implementations, which are to be named.

The second implementations (`parity.meta.second`) share no layer with ours, so a diagnosis cannot just recognise our own
code. Each makes every mistake of the catalogue that it can, alone and in pairs, under the first ordinary scenario that
shows it. A mistake is named if it is the first and only cause that is given. With its entry left out of the catalogue,
the answer must be that the cause is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from parity import family as families
from parity import property as properties
from parity import reference
from parity.compare import Unequal
from parity.diagnose import Diagnosis, diagnose
from parity.evidence import Evidence, drawn_case
from parity.journal import Journal
from parity.mistakes import Mistake, find, of
from parity.pair import forward, pair_of
from parity.run import progress_bar
from parity.scenario import DTYPE_NAMES, Scenario
from parity.strategies import Pool, examples
from parity.table import as_json, write_atomically
from parity.workers import finished, prepare

RECORD = Path(__file__).parents[1] / "fixtures" / "diagnosed.json"
SCENARIOS = 40  # drawn at most until one shows the mistake
PAIRS = 3  # of mistakes, for every layer
DTYPES = ("f32", "bf16")
LEAST_NAMED = {"f32": 0.95, "bf16": 0.85}
LEAST_PAIRS = 0.9
MOST_SECONDS, LEAST_SOON = 2.0, 0.9
AND = ", and "
NAMES = {short: name for name, short in DTYPE_NAMES.items() if name != short}


@dataclass(frozen=True)
class Made:
    """Mistakes that a second implementation is to make together."""

    model: str
    layer: str
    mistakes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Outcome:
    """What was said of a second implementation.

    Attributes:
        made: its mistakes.
        scenario: the first ordinary scenario that shows them; empty if none did.
        causes: those that were given, in order.
        same: those among them that are the same function in this layer, as our own layers show in float64.
        without: those given with the entry of the mistake, and with what is the same, left out of the catalogue.
        seconds: CPU time of the diagnosis, with single mistakes alone.
        hidden: whether one of two mistakes hides the other, so that there is one to name.
    """

    made: Made
    scenario: str = ""
    causes: list[list[str]] = field(default_factory=list)
    same: list[list[str]] = field(default_factory=list)
    without: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0
    hidden: bool = False

    @property
    def named(self) -> bool:
        """Whether the mistakes were named, and nothing else but what is the same."""
        others = [cause for cause in self.causes if cause not in self.same]
        return [set(cause) for cause in others] == [set(self.made.mistakes)]


def makeable(model: str, layer: str) -> list[Mistake]:
    """The mistakes of the catalogue that the second implementation of a layer can make."""
    from parity.meta.second import SECOND

    return [mistake for mistake in of(model, layer) if mistake.name in SECOND[model, layer].MAKES]


def singles(model: str | None = None, dtypes: Sequence[str] = DTYPES) -> list[Made]:
    """Every mistake that any second implementation can make, of one family or of all."""
    return [
        Made(*place, (mistake.name,), dtype)
        for place in _places(model)
        for mistake in makeable(*place)
        for dtype in dtypes
    ]


def pairs(model: str | None = None, seed: int = 0, count: int = PAIRS) -> list[Made]:
    """Some pairs of mistakes of different kinds, for every layer."""
    made = []
    for place in _places(model):
        couples = [couple for couple in combinations(makeable(*place), 2) if couple[0].kind != couple[1].kind]
        chosen = Random(f"{seed} {place}").sample(couples, min(count, len(couples)))
        made += [Made(*place, tuple(mistake.name for mistake in couple), "f32") for couple in chosen]
    return made


def _places(model: str | None) -> Iterator[tuple[str, str]]:
    from parity.meta.second import SECOND

    return (place for place in SECOND if model in (None, place[0]))


def outcome(seed: int, made: Made) -> Outcome:
    """Have mistakes made, and their cause looked for."""
    from parity.meta.second import second_pair

    scenario = _first_failing(made, seed)
    if scenario is None:
        return Outcome(made)
    build, prop = partial(second_pair, made.model, made.layer, wrong=made.mistakes), _property(made)
    ask = partial(diagnose, build(scenario.config), scenario, prop, dtype=made.dtype, pair_at=build)
    start = time.process_time()
    first = ask(depth=1)
    found = Outcome(made, str(scenario), _names(first), seconds=time.process_time() - start)
    true = {find(name) for name in made.mistakes}
    if len(true) > 1:
        return replace(found, hidden=True) if first.causes else replace(found, causes=_names(ask(depth=2)))
    others = [cause.mistakes[0] for cause in first.causes if cause.mistakes[0] not in true]
    same = [other for other in others if _is_same(made, other, seed)]
    found = replace(found, same=[[other.name] for other in same])
    if found.named:
        return found  # the others were tried, and none explains it
    left = [mistake for mistake in of(made.model, made.layer) if mistake not in true and mistake not in same]
    return replace(found, without=_names(ask(depth=1, known=left)))


def _is_same(made: Made, other: Mistake, seed: int) -> bool:
    """Whether our own layer computes the same with another mistake, under many scenarios other than those asked."""
    prop = _property(made)
    for scenario in _ordinary(made.model, made.layer, prop, "f64", seed + 1):
        pair = pair_of(made.model, made.layer, scenario.config)
        with find(made.mistakes[0]).exchange():
            evidence = Evidence(pair.beside(), partial(drawn_case, pair, scenario, prop, "f64"), forward, "f64")
        if not evidence.explained_by((other,)):
            return False
    return True


@lru_cache(maxsize=8)
def _ordinary(model: str, layer: str, prop: properties.Property, dtype: str, seed: int) -> list[Scenario]:
    """What ordinary runs draw."""
    family = families.load(model)
    drawn = prop.scenarios(family, family.layer(layer), Pool(dtypes=(dtype,), seed=seed))
    return examples(drawn, SCENARIOS, seed)


def _names(diagnosis: Diagnosis) -> list[list[str]]:
    return [[mistake.name for mistake in cause.mistakes] for cause in diagnosis.causes]


def _property(made: Made) -> properties.Property:
    """The property that shows one of the mistakes; outputs and caches, where any shows there."""
    props = {find(name).prop for name in made.mistakes}
    return properties.find("forward" if "forward" in props else props.pop())


def _first_failing(made: Made, seed: int) -> Scenario | None:
    """The first ordinary scenario that the second implementation fails."""
    from parity.meta.second import second_pair

    prop = _property(made)
    for scenario in _ordinary(made.model, made.layer, prop, made.dtype, seed):
        try:
            judged = prop.judge(second_pair(made.model, made.layer, scenario.config, made.mistakes), scenario)
        except Unequal:
            return scenario
        if not all(each.holds for each in judged if each.quantity.verdict != "precision"):
            return scenario
    return None


def measure(
    model: str | None, seed: int, workers: int, json: Path | None, console: Console, log: Path | None = None
) -> int:
    """Have all mistakes made and diagnosed, print what was named, and return the exit code: 0 if every bar holds.

    Args:
        log: notes every result there, goes on from those that it holds, and keeps the summary for the README.

    Raises:
        ReportError: if the log is of another run or cannot be written.
    """
    prepare()
    to_make = [*singles(model), *pairs(model, seed)]
    run = {"reference": reference.version(), "torch": torch.__version__, "seed": seed}
    journal = None if log is None else Journal(log, run, Outcome, read)
    known = {} if journal is None else {each.made: each for each in journal.done}
    left = [made for made in to_make if made not in known]
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=len(to_make), completed=len(to_make) - len(left))
        for each in finished(partial(outcome, seed), left, workers):
            known[each.made] = each
            if journal is not None:
                journal.add(each)
            progress.update(bar, advance=1, description=each.made.mistakes[0][:32])
    found = [known[made] for made in to_make]
    print_outcomes(found, console)
    held = bars(found)
    for each_bar in held:
        mark = "[green]holds[/green]" if each_bar["holds"] else "[red]FAILS[/red]"
        line = f"{each_bar['name']}: {each_bar['value']:.4g} {each_bar['unit']} (bar {each_bar['bar']:g})"
        console.print(f"  {mark} {line}", highlight=False)
    if json is not None:
        write_atomically(json, as_json({"bars": held, "diagnoses": [asdict(each) for each in found]}))
    if journal is not None:
        journal.close()
        write_atomically(RECORD, as_json({**run, "bars": held, "layers": summary(found)}) + "\n")
    return 0 if all(each_bar["holds"] for each_bar in held) else 1


def read(line: Mapping[str, Any]) -> Outcome:
    """An outcome from the fields of a line of the log."""
    made = line["made"]
    return Outcome(**{**line, "made": Made(**{**made, "mistakes": tuple(made["mistakes"])})})


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """What is recorded, by layer: of each dtype and of pairs what was named, what else was said, and what not seen."""
    layers: dict[str, Any] = {}
    for each in found:
        what = each.made.dtype if len(each.made.mistakes) == 1 else "pairs"
        layer = layers.setdefault(f"{each.made.model} {each.made.layer}", {})
        here = layer.setdefault(what, {"named": [], "called": {}, "unseen": [], "wrong without": {}})
        name = AND.join(each.made.mistakes)
        if not each.scenario or each.hidden:
            here["unseen"].append(name)
        elif each.named:
            here["named"].append(name)
        else:
            here["called"][name] = said(each.causes)
        if each.without:
            here["wrong without"][name] = said(each.without)
    return layers


def said(causes: Sequence[Sequence[str]]) -> str:
    """Causes in words."""
    return "; ".join(map(AND.join, causes)) or "unknown"


def print_outcomes(found: Sequence[Outcome], console: Console) -> None:
    """A row per layer with what was named of what was seen; then every case in which something else was said."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", *(f"named in {NAMES[dtype]}" for dtype in DTYPES), "pairs", "seconds"):
        table.add_column(name, no_wrap=True)
    for place in dict.fromkeys((each.made.model, each.made.layer) for each in found):
        here = [each for each in found if (each.made.model, each.made.layer) == place]
        cells = [_share(_of(here, dtype, 1)) for dtype in DTYPES]
        slowest = max((each.seconds for each in here), default=0.0)
        table.add_row(" ".join(place), *cells, _share(_of(here, "f32", 2)), f"{slowest:.2f}")
    console.print(table)
    for each in found:
        what = f"{each.made.model} {each.made.layer} {NAMES[each.made.dtype]}: {AND.join(each.made.mistakes)}"
        if not each.scenario:
            console.print(f"  not seen in {SCENARIOS} scenarios: {what}", highlight=False)
        elif each.same and each.named:
            same = ", ".join(map(AND.join, each.same))
            console.print(f"  {what}\n    is the same function there as {same}", highlight=False)
        elif not each.named and not each.hidden:
            console.print(
                f"  {what}\n    called {said(each.causes)}   ({each.scenario})", highlight=False, markup=False
            )
        if each.without:
            console.print(f"  {what}\n    called {said(each.without)} without its entry", highlight=False, markup=False)


def _of(found: Sequence[Outcome], dtype: str, count: int) -> list[Outcome]:
    """Those with so many mistakes in a dtype that were seen, and of which both show where they are two."""
    return [
        each
        for each in found
        if each.made.dtype == dtype and len(each.made.mistakes) == count and each.scenario and not each.hidden
    ]


def _share(found: Sequence[Outcome]) -> str:
    return f"{sum(each.named for each in found)} of {len(found)}" if found else "[dim]-[/dim]"


def bars(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What a diagnosis promises: the right name, never a wrong one, soon."""
    listed = []
    for dtype in DTYPES:
        if some := _of(found, dtype, 1):
            named = sum(each.named for each in some) / len(some)
            listed.append(_bar(f"named first and alone in {NAMES[dtype]}", named, "share", LEAST_NAMED[dtype]))
            unknown = sum(not each.without for each in some) / len(some)
            listed.append(_bar(f"unknown without its entry in {NAMES[dtype]}", unknown, "share", 1.0))
    if both := _of(found, "f32", 2):
        named = sum(each.named for each in both) / len(both)
        listed.append(_bar("pairs named in float32", named, "share", LEAST_PAIRS))
    seconds = [each.seconds for each in found if each.scenario and len(each.made.mistakes) == 1]
    if seconds:
        middle = median(seconds)
        listed.append({**_bar("seconds, median", middle, "s", MOST_SECONDS), "holds": middle < MOST_SECONDS})
        soon = sum(each < MOST_SECONDS for each in seconds) / len(seconds)
        listed.append(_bar(f"within {MOST_SECONDS:g} seconds", soon, "share", LEAST_SOON))
    return listed


def _bar(name: str, value: float, unit: str, least: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "bar": least, "holds": value >= least}
