"""What to do to the candidate's weights so that it is right; tried on the call that fails, confirmed on another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity import repairs
from parity.check.guest import Guest
from parity.check.record import Call
from parity.check.result import Failure
from parity.check.verdict import of
from parity.compare import Record, Unequal
from parity.repairs import Repair

if TYPE_CHECKING:
    from parity.check.session import Site


MOST_SECONDS = 60.0  # of looking for a repair


class _Enough(Exception):
    """It was looked for long enough."""


def mended(site: Site, failure: Failure, beat: Callable[[], None] = lambda: None) -> tuple[Repair | None, int]:
    """A repair of the weights that makes the candidate right, if there is any, and how many were tried.

    Args:
        beat: called before each of them.
    """
    start = time.process_time()
    calls = _first_calls(site)
    guest, tried = site.guest("f64"), 0
    weights = {name: value.detach().clone() for name, value in guest.parameters.items()}
    if not weights or not calls:
        return None, 0
    call, *others = calls

    def count() -> None:
        nonlocal tried
        beat()
        if time.process_time() - start > MOST_SECONDS:
            raise _Enough
        tried += 1

    def confirmed(repair: Repair) -> bool:
        return all(_holds(site, guest, other, repair.applied(weights), repair.whole) for other in others)

    try:
        truth = _comparable(site, guest, call)
        found = repairs.find(
            weights, lambda given: _run(site, guest, call, given), truth, confirm=confirmed, on_try=count
        )
        return found, tried
    except (Unequal, _Enough):
        return None, tried
    finally:
        _load(guest, weights)


def _first_calls(site: Site) -> list[Call]:
    """Two calls with a cache that is still empty, as a filled one has the reference's order; else any two."""
    first = [site.built.calls(name)[0] for name, reason in site.scenarios.items() if reason is None]
    return [call for call in first if call.cached and call.step == 0][:2] or first[:2]


def _comparable(site: Site, guest: Guest, call: Call) -> Record:
    truth = site.built.truth(call)
    return of(guest.forward(call, truth)[0], truth)


def _run(site: Site, guest: Guest, call: Call, weights: Mapping[str, Tensor]) -> Record:
    _load(guest, weights)
    truth = site.built.truth(call)
    return of(truth, guest.forward(call, truth)[0])


def _holds(site: Site, guest: Guest, call: Call, weights: Mapping[str, Tensor], whole: bool) -> bool:
    try:
        truth = _comparable(site, guest, call)
    except Unequal:
        return False
    wrong = repairs.wrong_verdicts(lambda given: _run(site, guest, call, given), weights, truth)
    return wrong is not None and not wrong - (set() if whole else {"cache"})


def _load(guest: Guest, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in guest.parameters.items():
            parameter.copy_(weights[name])
