"""What a candidate computed under one scenario, held against a layer that makes known mistakes.

The layer is our own, or a second implementation of it, where our own is itself wrong. In float64 the two must be the
same; of a candidate in a lower precision, within the error that the layer makes in that precision with the mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from enum import IntEnum
from functools import cached_property, partial

import torch
from torch import Tensor

from parity import family as families
from parity import routing
from parity.case import Case
from parity.compare import Judgement, Record, Unequal
from parity.mistakes import Mistake
from parity.pair import Measure, Pair, form_arguments, judge_records, measured, run_disturbed, versions
from parity.property import Property
from parity.scenario import DTYPES, Scenario
from parity.tiny import initialise
from reimpl.attention import IMPLEMENTATIONS

F64 = torch.float64
NEAR = 32  # times the allowance, beyond which a second look at the yardstick is not worth its time
DISTURBANCES = 4  # for that look
Making = Callable[[Pair, Sequence[Mistake]], AbstractContextManager[Pair]]
"""Puts a layer that makes mistakes beside the reference of a pair; good as long as the context lasts."""


@contextmanager
def by_ours(pair: Pair, mistakes: Sequence[Mistake]) -> Iterator[Pair]:
    """Our own layer makes them."""
    with ExitStack() as stack:
        for mistake in mistakes:
            stack.enter_context(mistake.exchange())
        yield pair.beside(families.load(pair.family.model_type).layer(pair.layer.name))


@contextmanager
def by_second(pair: Pair, mistakes: Sequence[Mistake]) -> Iterator[Pair]:
    """A second implementation makes them."""
    from parity.meta.second import second_beside

    yield second_beside(pair, [mistake.name for mistake in mistakes])


def made_by_second(pair: Pair) -> frozenset[str]:
    """The mistakes that a second implementation of this layer can make; none where there is none."""
    from parity.meta.second import SECOND

    second = SECOND.get((pair.family.model_type, pair.layer.name))
    return frozenset() if second is None else frozenset(second.MAKES)


def is_right(making: Making, pair: Pair, scenario: Scenario, prop: Property) -> bool:
    """Whether the layer computes what the reference computes, when it makes no mistakes."""
    try:
        with making(pair, ()) as right:
            judged = prop.judge(right, scenario)
    except Unequal:
        return False
    return all(each.holds for each in judged if each.quantity.verdict != "precision")


class Fit(IntEnum):
    """How near a layer comes to the candidate: not, by the yardstick of disturbed inputs only, or by its own."""

    NONE = 0
    DISTURBED = 1
    CLOSE = 2


class Evidence:
    """What the candidate computed under one scenario, to be held against what a layer computes with mistakes.

    Attributes:
        making: which layer; layer by default.

    Raises:
        Unequal: if the candidate raises something itself.
    """

    making: Making = staticmethod(by_ours)

    def __init__(self, pair: Pair, draw: Callable[[], Case], measure: Measure, dtype: str) -> None:
        self.pair, self._draw, self.measure, self.name, self.dtype = pair, draw, measure, dtype, DTYPES[dtype]
        self.record, self.writes = self._run(pair, self.dtype)

    def _run(self, pair: Pair, dtype: torch.dtype, told: routing.Told | None = None) -> tuple[Record, list[str]]:
        """What a pair's candidate computes, and what it writes to; a case of its own, as that may be spoilt."""
        case, side = self._case, pair.candidate(dtype)
        if side.slots:
            pair.load(side, self._weights, case.scenario.seed)
        before = versions(case)
        record = measured(pair, side, case, self.measure, told or {})
        after = versions(case)
        writes = [name.partition(" in ")[0] for name, count in before.items() if after[name] != count]
        if writes:
            del self._case  # drawn again, the same
        return record, writes

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        return initialise.fill(self.pair.plan, self._case.scenario.seed)

    @cached_property
    def _case(self) -> Case:
        return self._draw()

    def held_against(self, making: Making) -> Evidence:
        """The same, to be held against what another layer computes."""
        other = copy(self)
        for name in ("_right", "differs"):
            vars(other).pop(name, None)
        other.making = making
        return other

    def explained_by(self, mistakes: Sequence[Mistake]) -> bool:
        """Whether the layer, making these mistakes, computes the same, by a measure that tells it from a right one."""
        return self.fit(mistakes) is not Fit.NONE

    def fit(self, mistakes: Sequence[Mistake]) -> Fit:
        """How near the layer comes, making these mistakes."""
        try:
            with self.making(self.pair, mistakes) as layer:
                return self._fit(layer, *self._run(layer, F64), powerful=self.dtype is not F64 and self.differs)
        except Unequal:
            return Fit.NONE

    def steady(self, mistakes: Sequence[Mistake]) -> bool:
        """Whether the layer, making these mistakes, computes the same twice, as it does not by dropout."""
        try:
            with self.making(self.pair, mistakes) as layer:
                one, other = (self._run(layer, F64)[0].values for _ in range(2))
        except Unequal:
            return True
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))

    @cached_property
    def _right(self) -> tuple[Pair, Record, list[str]]:
        """What the layer computes as it should be."""
        with self.making(self.pair, ()) as layer:
            return layer, *self._run(layer, F64)

    @cached_property
    def differs(self) -> bool:
        """Whether the layer, as it should be, computes something else; to be asked for before any mistake is made."""
        try:
            return self._fit(*self._right, powerful=False) is Fit.NONE
        except Unequal:
            return True

    def _fit(self, layer: Pair, mistaken: Record, writes: list[str], powerful: bool) -> Fit:
        if writes != self.writes:
            return Fit.NONE
        if self.dtype is F64:
            return Fit.CLOSE if _holds(judge_records(layer, self._case, mistaken, self.record, [], "f64")) else Fit.NONE
        told = routing.agreed(self.record, mistaken)
        if not routing.obeyed(mistaken, told):
            mistaken, _ = self._run(layer, F64, told)
        yards: list[Record] = []
        for fit, more in self._yardsticks(layer, told):
            yards += more()
            judgements = judge_records(layer, self._case, mistaken, self.record, yards, self.name)
            if any(judgement.ratio > NEAR for judgement in judgements):
                return Fit.NONE
            if _holds(judgements):
                return Fit.NONE if powerful and not self._tells(layer, mistaken, yards) else fit
        return Fit.NONE

    def _tells(self, layer: Pair, mistaken: Record, yards: Sequence[Record]) -> bool:
        """Whether what is allowed would not make the layer pass without the mistake, as where each run is another."""
        _, right, writes = self._right
        as_candidate = replace(right, values=[value.to(self.dtype) for value in right.values])
        try:
            judged = judge_records(layer, self._case, mistaken, as_candidate, yards, self.name)
        except Unequal:
            return True
        return writes != self.writes or not _holds(judged)

    def _yardsticks(self, layer: Pair, told: routing.Told) -> Iterator[tuple[Fit, Callable[[], list[Record]]]]:
        """What the layer computes in the candidate's dtype: as it is, in its other ways, with its inputs disturbed."""
        for way in self._ways(layer):
            yield Fit.CLOSE, partial(self._run_once, way, told)
        side = layer.candidate(self.dtype)
        yield Fit.DISTURBED, partial(run_disturbed, layer, side, self._case, self.measure, told, DISTURBANCES)

    def _run_once(self, pair: Pair, told: routing.Told) -> list[Record]:
        return [self._run(pair, self.dtype, told)[0]]

    @staticmethod
    def _ways(layer: Pair) -> Iterator[Pair]:
        """The layer with each of its implementations, as far as it has any."""
        if "attend" not in layer.layer.axes:
            yield layer
            return
        for way in IMPLEMENTATIONS:
            other = layer.beside()
            other.point = {**layer.point, "attend": way}
            yield other


def drawn_case(pair: Pair, scenario: Scenario, prop: Property, dtype: str) -> Case:
    """The case of a scenario, with all that layers are called with in float64 and in the candidate's dtype."""
    case = prop.case(pair, scenario)
    for each in {F64, DTYPES[dtype]}:
        form_arguments(pair, case, each)
    return case


def _holds(judgements: Sequence[Judgement]) -> bool:
    return all(judgement.holds for judgement in judgements)
