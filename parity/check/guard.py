"""What proves nothing: a candidate that runs the reference, hands back its input, or does not read its weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from parity.check import replay

MODELS = "transformers.models."
MOST_READ = 40  # parameters that are made NaN one at a time


class Calls:
    """The functions of the reference's layers that run while the context lasts, in the order of their first call."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(MODELS):
            self.names.setdefault(frame.f_code.co_qualname)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note them; a profiler or tracer that runs already comes back afterwards."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before if callable(before) else None)


def refused_calls(names: Iterable[str], shared: Sequence[str]) -> str | None:
    """Why a candidate that runs these functions of the reference proves nothing; None if all are declared as shared."""
    foreign = [name for name in names if name.split(".")[-1] not in shared and name not in shared]
    if not foreign:
        return None
    more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    helpers = all("." not in name for name in foreign)
    remedy = (
        f"; if that is meant, say --shared {foreign[0]}, and the report says that it is taken as right"
        if helpers
        else ""
    )
    return (
        f"it runs the reference's own code ({', '.join(foreign[:3])}{more}), so that it is held against itself{remedy}"
    )


def returns_input(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Whether an output is one of the inputs, in whole and unchanged."""
    given = [each for each in inputs if each.is_floating_point()]
    return any(
        output is each or (output.shape == each.shape and bool(torch.equal(output.detach(), each.detach())))
        for output in outputs
        for each in given
    )


def unread(module: nn.Module, run: Any, names: Sequence[str]) -> list[str]:
    """The parameters that may be anything, as filling them with NaN changes nothing of what `run()` returns.

    Args:
        run: gives tensors.
    """
    parameters, before = dict(module.named_parameters()), run()
    found = []
    with torch.no_grad():
        for name in names:
            kept = parameters[name].detach().clone()
            parameters[name].fill_(torch.nan)
            try:
                after = run()
            finally:
                parameters[name].copy_(kept)
            if all(replay.same(one, other) for one, other in zip(before, after, strict=True)):
                found.append(name)
    return found
