"""Scenarios that are drawn beside the named ones: written as lines, read back, and made smaller where they fail.

A line is one of `parity.scenario`; of its words a whole model knows rows, chunks, padding, the first position, the
scale of the inputs and the seed: `b2 s5,1,1 left0,2 masked @40 x0.01 #17`. Ids have no scale: it is that of what the
class under test is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from parity.check.drive import Text
from parity.scenario import Scenario, ScenarioError, parse_scenario
from parity.strategies import LONGEST, SEEDS, examples, schedules

SCALES = (1.0, 1e-3, 1e2)
OFFSETS = (1, 40, 3000)
KNOWN = {"batch", "schedule", "side", "padding", "masked_positions", "offset", "scale", "seed"}
SIMPLEST = str(Scenario(schedule=(1,)))  # which is always drawn first, and which the named ones make superfluous
MOST_TRIES = 40  # smaller scenarios, of one that fails


def drawn(task: str, count: int, seed: int) -> list[str]:
    """The lines of so many scenarios of a task, the same for the same seed."""
    lines = dict.fromkeys(map(str, examples(scenarios(task), count + 1, seed)))
    return [line for line in lines if line != SIMPLEST][:count]


@st.composite
def scenarios(draw: DrawFn, task: str) -> Scenario:
    """Scenarios that a whole model of a task may go through."""
    one_pass = st.integers(1, LONGEST).map(lambda length: (length,))
    schedule = draw(one_pass if task == "masked" else schedules())
    batch, length = draw(st.integers(1, 3)), schedule[0] if task != "causal" else sum(schedule)
    fields: dict[str, Any] = {"scale": draw(st.sampled_from(SCALES)), "seed": draw(SEEDS)}
    shape = draw(st.sampled_from(("plain", "padded") if task != "causal" else ("plain", "padded", "offset")))
    if shape == "padded" and length > 1:
        fields["padding"] = tuple(draw(st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch)))
        fields["side"] = draw(st.sampled_from(("left", "right"))) if len(schedule) == 1 else "left"
        fields["masked_positions"] = task == "causal" and draw(st.booleans())
    elif shape == "offset":
        fields["offset"] = draw(st.sampled_from(OFFSETS))
    return Scenario(batch=batch, schedule=schedule, **fields)


def text(line: str) -> Text:
    """What a scenario's line says is run through a model.

    Raises:
        ScenarioError: for a word that is not understood, or that has no meaning for a whole model.
    """
    scenario = parse_scenario(line)
    plain = Scenario()
    if odd := [name for name in vars(plain) if name not in KNOWN and getattr(scenario, name) != getattr(plain, name)]:
        raise ScenarioError(f"scenario {line!r}: {odd[0]} has no meaning for a whole model of the reference")
    if scenario.side == "inner" and any(scenario.padding):
        raise ScenarioError(f"scenario {line!r}: rows are padded left or right here")
    return Text(
        line,
        "drawn",
        scenario.schedule,
        scenario.padding or (0,) * scenario.batch,
        cached=len(scenario.schedule) > 1,
        seed=scenario.seed,
        side=scenario.side,
        counted=scenario.masked_positions,
        offset=scenario.offset,
        scale=scenario.scale,
    )


def line_of(text: Text) -> str:
    """A named scenario as a line, as far as a line can say it."""
    padded = {"padding": text.padding, "masked_positions": text.counted} if any(text.padding) else {}
    rest: dict[str, Any] = {"offset": text.offset, "scale": text.scale, "seed": text.seed, **padded}
    return str(Scenario(batch=text.rows, schedule=text.steps, side=text.side, **rest))


def smallest(line: str, fails: Callable[[str], bool]) -> str:
    """The smallest scenario that still fails, as far as simple steps lead to it."""
    tried: set[str] = set()
    while True:
        for smaller in map(str, _smaller(parse_scenario(line))):
            if smaller not in tried and len(tried) < MOST_TRIES:
                tried.add(smaller)
                if fails(smaller):
                    line = smaller
                    break
        else:
            return line


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Simpler ones: a row, no padding, no offset, one scale, one seed, fewer chunks, fewer tokens."""
    plain = Scenario(schedule=scenario.schedule)
    for name in ("scale", "offset", "seed"):
        if getattr(scenario, name) != getattr(plain, name):
            yield replace(scenario, **{name: getattr(plain, name)})
    if any(scenario.padding):
        yield replace(scenario, padding=(), masked_positions=False, side="left")
        if scenario.masked_positions:
            yield replace(scenario, masked_positions=False)
    if scenario.batch > 1:
        for row in range(scenario.batch):
            yield replace(scenario, batch=1, padding=scenario.padding[row : row + 1])
        yield replace(scenario, batch=scenario.batch - 1, padding=scenario.padding[:-1])
    yield from _with_schedules(scenario)


def _with_schedules(scenario: Scenario) -> Iterator[Scenario]:
    """Without one of its chunks; with a chunk of one token, of half of them, of one fewer."""
    chunks = scenario.schedule
    shorter = [chunks[:i] + chunks[i + 1 :] for i in reversed(range(len(chunks))) if len(chunks) > 1]
    for i, count in enumerate(chunks):
        fewer = dict.fromkeys(each for each in (1, 2, count // 2, count - 1) if 0 < each < count)
        shorter += [(*chunks[:i], each, *chunks[i + 1 :]) for each in fewer]
    for schedule in shorter:
        try:
            yield replace(scenario, schedule=schedule)
        except ScenarioError:
            continue  # its padding would leave nothing
