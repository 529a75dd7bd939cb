"""A mismatch in lines: what differs, where first, by how much, in which scenarios, and how to see it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from parity import reference
from parity.check import guard, replay
from parity.check.locate import Located, locate, look
from parity.check.mend import mended
from parity.check.result import Failure, Row, Where
from parity.compare import Judgement, Unequal, worst
from parity.mismatch import MEASURED, NAMES

if TYPE_CHECKING:
    from parity.check.session import Options, Site

SHOWN = 4  # names in one enumeration


def explained(sites: Sequence[Site], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The mismatch of the first property that fails: that of the simplest call, float64 first.

    Where the forward is wrong the gradients are, too, and there is nothing to learn from them.
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
            found[row.prop] = {
                "property": row.prop,
                "dtype": NAMES[row.dtype],
                "headline": _headline(site, failure),
                "lines": [list(line) for line in _lines(site, row, failure, rows, words, located)],
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
    site: Site, row: Row, failure: Failure, rows: Sequence[Row], words: Sequence[str], located: Located | None
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
    if not live and set(failure.verdicts) & {"output", "cache"} and failure.said is None:
        yield from _cause(site, failure)
    yield "fails", _spread(row, rows)
    yield "smallest", f"{_scenario(failure.where)}, configuration {failure.where.number} ({failure.where.point})"
    yield "again", again(site.session.options, row, failure.where)


def _cause(site: Site, failure: Failure) -> Iterator[tuple[str, str]]:
    """What would mend it, if anything known does."""
    repair, tried = mended(site, failure)
    if repair is None:
        yield "cause", f"unknown: none of {tried} repairs of the weights makes it right"
    else:
        yield "cause", f"right with other weights: {repair.what}   (explains the whole difference)"
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

    unread = guard.unread(guest.module, run, list(guest.parameters)[: guard.MOST_READ])
    return f"the candidate never reads {_few(unread)}" if unread else None


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
    text = f"in {len(row.failures)} of {row.cases} calls: {', '.join(failing)}"
    if holding:
        text += f"; holds in {', '.join(holding)}"
    plain = [failure for failure in row.failures if failure.where.number == 0]
    if not plain:
        text += "; holds in the plain configuration"
    return f"{text}; in {', '.join(dtypes)}"


def _scenario(where: Where) -> str:
    return where.scenario if where.call == 0 else f"call {where.call} of {where.scenario}"


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
