"""Timing several ways to compute the same thing: in one process, in turn, by the ratios of neighbours in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

WORTH_TIMING = 2e-3
"""Seconds; what takes less is called several times between two looks at the clock."""

FEWEST, ENOUGH = 3, 20.0
"""So many repeats at least; no more once they took so many seconds, as the longer a call, the steadier its time."""

WARM = 0.5
"""Seconds."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to compute.

    Attributes:
        prepare: gets everything ready and returns what is to be timed; it may be called so often as `most` says.
    """

    name: str
    prepare: Callable[[], Call]
    most: int = 1000


def contest(contestants: Sequence[Contestant], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of one call of each contestant, in every repeat; fewer repeats of what takes long."""
    calls = _calls(contestants)
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for repeat in range(repeats):
        if repeat >= FEWEST and sum(map(sum, seconds.values())) >= ENOUGH:
            break
        first = repeat % len(contestants)
        for each in (*contestants[first:], *contestants[:first]):
            seconds[each.name].append(_seconds(each.prepare(), calls))
    return seconds


def ratios(seconds: dict[str, list[float]], ours: str) -> dict[str, float]:
    """How many times as long the others take; the median over the repeats."""
    return {
        name: median(theirs / mine for theirs, mine in zip(times, seconds[ours], strict=True))
        for name, times in seconds.items()
        if name != ours
    }


def _calls(contestants: Sequence[Contestant]) -> int:
    """How often to call in a row. The first calls of each also warm it up."""
    fastest = min(_warm(each) for each in contestants)
    return max(1, min(math.ceil(WORTH_TIMING / fastest), *(each.most for each in contestants)))


def _warm(contestant: Contestant) -> float:
    """Seconds of a call after the first; of what takes long, the first is warm for most of its time."""
    first = _seconds(contestant.prepare(), 1)
    return first if first >= WARM else min(first, _seconds(contestant.prepare(), 1))


def _seconds(call: Call, calls: int) -> float:
    """CPU time of one call; unlike that on the wall, it does not depend on what else the machine does meanwhile."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls
