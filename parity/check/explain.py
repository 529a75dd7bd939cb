"""A mismatch in lines: what differs, where first, by how much, in which scenarios, and how to see it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from parity import reference
from parity.check import drawn, drive, guard, replay
from parity.check.cause import cause_of
from parity.check.guest import HANGS
from parity.check.locate import Located, locate, look
from parity.check.mend import mended
from parity.check.result import Failure, Row, Where
from parity.check.verdict import is_first, judged
from parity.compare import Judgement, Unequal, worst
from parity.mismatch import MEASURED, NAMES

if TYPE_CHECKING:
    from parity.check.session import Options, Site

SHOWN = 4  # names in one enumeration


def explained(
    sites: Sequence[Site], rows: Sequence[Row], beat: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The mismatch of the first property that fails: that of the simplest call, float64 first.

    Where the forward is wrong the gradients are, too, and there is nothing to learn from them.

    Args:
        beat: called again and again while causes are looked for.
    """
    of_number = {site.number: site for site in sites}
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.failures and not found:
            failure = row.failures[0]
            site = of_number[failure.where.number]
            live = row.prop.startswith("swap")
            words, shown = ([], []) if live else look(site, failure)
            located = None if live else locate(site, failure)
            cause = [] if live else list(_cause(sites, site, failure, beat))
            found[row.prop] = {
                "property": row.prop,
                "dtype": NAMES[row.dtype],
                "headline": _headline(site, failure),
                "lines": [list(line) for line in _lines(site, row, failure, rows, words, located, cause, beat)],
                "pictures": [asdict(each) for each in shown],
                "course": [] if located is None else located.course,
                "first": None if located is None else located.first,
            }
    return list(found.values())


def _headline(site: Site, failure: Failure) -> str:
    what = " and ".join(failure.verdicts) if failure.said is None else "candidate"
    verb = "differ" if what.count(" and ") else "differs"
    return f"{site.session.options.name} / {site.session.subject}   {what} {verb} from {reference.version()}"


def _lines(
    site: Site,
    row: Row,
    failure: Failure,
    rows: Sequence[Row],
    words: Sequence[str],
    located: Located | None,
    cause: Sequence[tuple[str, str]],
    beat: Callable[[], None],
) -> Iterator[tuple[str, str]]:
    measured = [judgement for judgement in failure.failed if judgement.quantity.verdict in MEASURED]
    largest = worst(measured)
    if failure.said is not None:
        yield "what", failure.said
    for judgement in failure.failed:
        if judgement.quantity.verdict not in MEASURED:
            yield "what", _remark(judgement)
    live = row.prop.startswith("swap")
    if failure.said is None and not live and (shown := suspicion(site, failure, row.dtype)):
        yield "what", shown
    if located is not None:
        yield "where", located.sentence
    if largest is not None and math.isinf(largest.error):
        yield "what", f"{largest.quantity} is not finite, where the reference is"
    elif largest is not None:
        yield "size", _size(largest)
        if others := [str(j.quantity) for j in measured if j is not largest]:
            yield "also", _few(list(dict.fromkeys(others)))
    if words:
        yield "outputs", ", ".join(words)
    yield from cause
    yield "fails", _spread(row, rows)
    scenario = failure.where.scenario if live else smallest(site, row, failure, beat)
    yield "smallest", f"{scenario}, configuration {failure.where.number} ({failure.where.point})"
    yield "again", again(site.session.options, row, replace(failure.where, scenario=scenario))


def _cause(sites: Sequence[Site], site: Site, failure: Failure, beat: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """The mistake that it makes, and what would mend it, as far as anything known does."""
    if failure.said is not None or not set(failure.verdicts) & {"output", "cache"}:
        return
    if any(math.isinf(judgement.error) for judgement in failure.failed):
        yield "cause", "unknown: no mistake is tried where something is not finite"
        return
    if wavers(site, failure):
        return
    cause, (repair, tried) = cause_of(sites, beat), mended(site, failure, beat)
    if cause.names:
        yield "cause", str(cause)
    elif repair is not None:
        yield "cause", f"right with other weights: {repair.what}   (explains the whole difference)"
    else:
        yield (
            "cause",
            f"unknown: none of {cause.tried} known mistakes explains it, and none of {tried} repairs mends it",
        )
    if repair is not None:
        yield "fix", repair.line + ("" if repair.whole else "   (the cache keeps an order of its own)")


def suspicion(site: Site, failure: Failure, name: str) -> str | None:
    """What a wrong candidate looks like: one that hands back its input, or never reads some weights."""
    call = site.built.calls(failure.where.scenario)[failure.where.call]
    guest, truth = site.guest(name), site.built.truth(call)
    arguments, _ = replay.arguments(call, guest.dtype)
    inputs = [*arguments, *replay.arguments(call, guest.dtype)[1].values()]
    try:
        replayed = guest.replay(call, truth)
    except Unequal:
        return None
    if guard.returns_input(replayed.output.values(), [each for each in inputs if isinstance(each, Tensor)]):
        return "the candidate returns its input"

    def run() -> list[Tensor]:
        again = guest.replay(call, truth)
        return [*again.output.values(), *again.cache.values()]

    if wavers(site, failure):
        return "the candidate gives another result each time it is called"
    unread = guard.unread(guest.module, run, list(guest.parameters)[: guard.MOST_READ])
    return f"the candidate never reads {_few(unread)}" if unread else None


def wavers(site: Site, failure: Failure) -> bool:
    """Whether a call gives other numbers when it is made again."""
    call, guest = site.built.calls(failure.where.scenario)[failure.where.call], site.guest("f64")
    truth = site.built.truth(call)
    try:
        first, second = (guest.forward(call, truth)[0].values for _ in range(2))
    except Unequal:
        return False
    return not all(map(replay.same, first, second))


def _remark(judgement: Judgement) -> str:
    if judgement.quantity.verdict == "routing":
        return f"{judgement.quantity} differs: {judgement.error:.1g} below what should have been chosen"
    if judgement.quantity.verdict != "precision":
        return f"{judgement.quantity}, where the reference does not"
    return f"{judgement.quantity} is computed in a coarser dtype than in the reference"


def _size(failed: Judgement) -> str:
    times = f"{failed.ratio:.0e} times the allowance of {failed.allowed:.0e}"
    return f"{failed.error:.2g} relative, {times} ({failed.quantity}, {NAMES[failed.dtype]})"


def _few(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _spread(row: Row, rows: Sequence[Row]) -> str:
    """In which scenarios, dtypes and configurations it fails, and in which it holds."""
    failing = list(dict.fromkeys(failure.where.scenario for failure in row.failures))
    holding = [name for name in row.ran if name not in failing]
    dtypes = [other.dtype for other in rows if other.prop == row.prop and other.failures]
    text = f"in {len(row.failures)} of {row.cases} calls: {_scenarios(failing)}"
    if holding:
        text += f"; holds in {_scenarios(holding)}"
    plain = [failure for failure in row.failures if failure.where.number == 0]
    if not plain:
        text += "; holds in the plain configuration"
    return f"{text}; in {', '.join(dtypes)}"


def _scenarios(names: Sequence[str]) -> str:
    """Those that have a name, and how many were drawn."""
    count = sum(name not in drive.TEXTS for name in names)
    return ", ".join([*(name for name in names if name in drive.TEXTS), *([f"{count} drawn"] if count else [])])


def fails(site: Site, row: Row, scenario: str) -> bool:
    """Whether a scenario shows that a row's property does not hold."""
    if site.built.refusal(scenario) is not None:
        return False
    calls = [call for call in site.built.calls(scenario) if row.prop == "forward" or is_first(call)]
    try:
        found = [judged(site.built, site.guest(row.dtype), call, row.prop, row.dtype) for call in calls]
    except Unequal:
        return True
    return not all(judgement.holds for each in found for judgement in each)


def smallest(site: Site, row: Row, failure: Failure, beat: Callable[[], None]) -> str:
    """The smallest scenario that fails as well, as a line; the one that failed, if no line does."""
    scenario = failure.where.scenario
    if failure.said is not None and HANGS in failure.said:
        return scenario  # it would do so again and again

    def still(line: str) -> bool:
        beat()
        return fails(site, row, line)

    line = drawn.line_of(site.built.text(scenario))
    return drawn.smallest(line, still) if still(line) else scenario


def again(options: Options, row: Row, where: Where) -> str:
    """The line to paste that runs this scenario alone."""
    words = ["parity", "check", options.name, "--against", options.against]
    for flag, value in (("--adapter", options.adapter), ("--weights", options.weights)):
        if isinstance(value, str):
            words += [flag, value]
    if row.prop.startswith("swap"):
        return shlex.join([*words, "--swap", "--examples", "1"])
    words += [
        "--property",
        row.prop,
        "--dtype",
        NAMES[row.dtype],
        "--point",
        str(where.number),
        "--scenario",
        where.scenario,
    ]
    words += ["--examples", str(options.configurations)] * (options.configurations != DEFAULT_CONFIGURATIONS)
    words += ["--seed", str(options.seed)] * (options.seed != 0)
    words += ["--layer-idx", str(options.layer_idx)] * (options.layer_idx is not None)
    return shlex.join(words)


DEFAULT_CONFIGURATIONS = 4
