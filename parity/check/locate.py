"""Where a candidate first parts from the reference in a recorded call, and what its error looks like; in float64."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity import patterns
from parity.blame import Chain, paths
from parity.check import replay, tree
from parity.check.guest import values_of
from parity.check.record import Call
from parity.check.replay import Replayed
from parity.check.result import Failure
from parity.collect import Collect, Unfused
from parity.compare import Record, Unequal
from parity.oracle import lifted
from parity.pictures import Picture, picture
from parity.watch import Seen, Watch

if TYPE_CHECKING:
    from parity.check.session import Site

F64 = torch.float64


@dataclass(frozen=True)
class Located:
    """The first quantity of the reference whose numbers the candidate never forms.

    Attributes:
        first: its name.
        sentence: what departs there, and what is right before it.
        course: how far the candidate is from each quantity, in the order in which the reference forms them.
    """

    first: str
    sentence: str
    course: list[tuple[str, float]]


def locate(site: Site, failure: Failure) -> Located | None:
    """Where the two sides first part; None if that is not known."""
    names = [
        judgement.quantity.name for judgement in failure.failed if judgement.quantity.verdict in ("output", "cache")
    ]
    if not names and failure.said is None:
        return None
    call = site.built.calls(failure.where.scenario)[failure.where.call]
    try:
        return _located(site, call, names)
    except Exception:  # a reference that cannot be watched, or that autograd cannot follow: then it is not known where
        return None


def _located(site: Site, call: Call, names: list[str]) -> Located | None:
    guest, module = site.guest("f64"), site.built.module(F64, call=call)
    watch, collect = Watch(), Collect(guest.parameters.values())
    args, kwargs = replay.arguments(call, F64)
    cache = next(iter(tree.caches((args, kwargs)).values()), None)
    with torch.enable_grad(), lifted(), watch.over(module, sys.modules[type(module).__module__], cache):
        watch.note_results(tree.named("output", module(*args, **kwargs)))
    args, kwargs = replay.arguments(call, F64)
    with torch.no_grad(), collect, Unfused(), suppress(Exception):  # what it did before it broke off tells, too
        guest.run(call, args, kwargs)
    seen = watch.seen
    chain = Chain(
        [each.name for each in seen],
        [_defined(call, each) for each in seen],
        paths([each.value for each in seen]),
        collect,
        whole=[_is_whole(call, each) for each in seen],
    )
    results = [i for i, each in enumerate(seen) if each.result and (each.result in names or not names)]
    blamed = chain.blamed(results, sure=bool(names))
    return Located(str(chain.names[blamed[0]]), chain.sentence(blamed), chain.course()) if blamed else None


def look(site: Site, failure: Failure) -> tuple[list[str], list[Picture]]:
    """What the error of the first result looks like, in words and in pictures, with the cache's; empty without one."""
    call = site.built.calls(failure.where.scenario)[failure.where.call]
    truth, guest = site.built.truth(call), site.guest("f64")
    try:
        replayed = guest.replay(call, truth)
    except Unequal:
        return [], []
    ours = next(iter(replayed.output.values()))
    theirs = next(iter(values_of(truth, "output").values()))
    if ours.shape != theirs.shape or theirs.ndim < 3:
        return [], []
    shown = _of_cache(truth, replayed) if "cache" in failure.verdicts else []
    ours, theirs = ours.flatten(2), theirs.flatten(2)
    valid = call.valid if call.valid is not None and call.valid.shape == theirs.shape[:2] else None
    valid = torch.ones(theirs.shape[:2], dtype=torch.bool) if valid is None else valid
    errors = patterns.errors_of(ours, theirs, valid)
    if not (errors > patterns.EXACT).any():
        return (["exact"] if failure.verdicts == ["cache"] else []), shown
    words = [*patterns.by_token(errors, valid), *patterns.by_number(ours[valid], theirs[valid])]
    output = picture("output, float64", ("position", "channel"), ours, theirs, valid[..., None])
    return words, [output, *shown]


def _of_cache(truth: Record, replayed: Replayed) -> list[Picture]:
    """The cached tensor that is furthest off, where it has heads, positions and channels."""
    both = [
        picture(f"{name}, float64", ("head", "position", "channel"), replayed.cache[name], theirs)
        for name, theirs in values_of(truth, "cache").items()
        if name in replayed.cache and replayed.cache[name].shape == theirs.shape and theirs.ndim == 4
    ]
    return sorted(both, key=lambda each: -max(each.profiles["channel"]))[:1]


def _defined(call: Call, each: Seen) -> Tensor:
    """The rows of a quantity that belong to valid tokens."""
    value = each.value.detach()
    valid = replay.defined(call, value, "cache" if each.cached else "output")
    return value if valid is None else value[valid.expand_as(value)].view(-1, value.shape[-1])


def _is_whole(call: Call, each: Seen) -> bool:
    """Whether a quantity is one of all tokens of the call, not of those of one expert."""
    tokens = next((t.shape[:2] for t in tree.tensors(call.given).values() if t.ndim >= 2), None)
    return each.value.ndim != 2 or tokens is None or len(each.value) == tokens.numel()
