"""How much of a run's CPU time is the layers' own, and how many cases a second of it verifies.

A run of the family is recorded, call by call. Then the same calls are made again bare: the modules' own forwards, and
backwards where gradients were taken, with their arguments ready, nothing compared and nothing lifted. What that takes,
over what the run took, is the share.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity import property as properties
from parity.bench.bars import Bar
from parity.candidate import Candidate
from parity.case import Case, Step
from parity.family import Family, Layer
from parity.pair import Side, input_of, tables_of
from parity.profiles import load_profile
from parity.reference import Reference
from parity.runner import check, hold
from parity.scenario import DTYPES, Scenario

REPEATS = 7


@dataclass(frozen=True)
class Generation:
    """One text that a run let a side generate."""

    side: Side
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """One call that a run made: of a side, in a case, for a step, with or without autograd."""

    side: Side
    case: Case
    step: Step
    cached: bool
    differentiated: bool


def measure(model: str) -> list[Bar]:
    """All measures of the harness over a family."""
    load_profile()
    family = families.load(model)
    bars = [Bar("start to first verified case", _first_case(model), "s")]
    bars += [_rate(family, layer) for layer in family.layers]
    if any(layer.name == "attention" for layer in family.layers):
        rate = _decoding_rate(family, family.layer("attention"))
        bars.append(Bar("attention: prefill + 3 decodes, outputs and cache", rate, "cases / CPU s", least=1000))
    return [*bars, *_shares(family)]


def _first_case(model: str) -> float:
    """Wall time of a new process that verifies one case and ends."""
    chosen = ["--layer", "norm", "--property", "forward", "--examples", "1"]
    command = [sys.executable, "-m", "parity", "run", model, *chosen]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        finished = subprocess.run(command, check=True, capture_output=True, text=True)
        times.append(time.perf_counter() - start)
        assert "the row holds" in finished.stdout, finished.stdout
    return median(times)


def _rate(family: Family, layer: Layer) -> Bar:
    """Cases of the property `forward` per CPU second, drawn as a run draws them."""
    prop = properties.find("forward")
    hold(prop, family, layer, tuple(DTYPES), examples=5, seed=0)
    start = time.process_time()
    tally = hold(prop, family, layer, tuple(DTYPES), examples=40, seed=1)
    return Bar(f"{layer.name}: drawn cases, all verdicts", tally.cases / (time.process_time() - start), "cases / CPU s")


def _decoding_rate(family: Family, layer: Layer) -> float:
    """Cases of a prefill and three decoding steps per CPU second; the median over repeats."""
    prop, rates = properties.find("forward"), []
    for repeat in range(REPEATS):
        scenarios = [
            Scenario(schedule=(8, 1, 1, 1), batch=2, seed=10 * repeat + number, stack=8) for number in range(10)
        ]
        start = time.process_time()
        for scenario in scenarios:
            check(prop, family, layer, scenario)
        rates.append(sum(s.stack * len(s.dtypes) for s in scenarios) / (time.process_time() - start))
    return median(rates)


def _shares(family: Family) -> Iterator[Bar]:
    """The share of a run's CPU time that its calls take when they are made bare; per property, and in all."""
    total_run = total_bare = 0.0
    for prop in properties.properties().values():
        run = bare = 0.0
        for layer in family.layers:
            if not prop.applies(family, layer):
                continue
            hold(prop, family, layer, tuple(DTYPES), examples=2, seed=0)
            with recorded() as calls:
                start = time.process_time()
                hold(prop, family, layer, tuple(DTYPES), seed=1)
                run += time.process_time() - start
            bare += median(replay(calls) for _ in range(3))
        if run:
            yield Bar(f"share of the layers' own work: {prop.name}", bare / run, "of CPU time")
            total_run, total_bare = total_run + run, total_bare + bare
    yield Bar("share of the layers' own work: whole run", total_bare / total_run, "of CPU time", least=0.6)


@contextmanager
def recorded() -> Iterator[list[Call | Generation]]:
    """Note every call of a reference or a candidate."""
    calls: list[Call | Generation] = []

    def noting_call(original: Any) -> Any:
        def call(side: Any, case: Case, step: Step, x: Tensor, tables: Any = None, cache: Any = None) -> Any:
            calls.append(Call(side, case, step, cache is not None, torch.is_grad_enabled()))
            return original(side, case, step, x, tables, cache)

        return call

    def noting_generation(original: Any) -> Any:
        def generate(side: Any, *args: Any) -> Any:
            calls.append(Generation(side, args))
            return original(side, *args)

        return generate

    with pytest.MonkeyPatch.context() as patch:
        for cls in (Reference, Candidate):
            patch.setattr(cls, "__call__", noting_call(cls.__call__))
            patch.setattr(cls, "generate", noting_generation(cls.generate))
        yield calls


def replay(calls: Sequence[Call | Generation]) -> float:
    """CPU seconds of the modules' own forwards and backwards in these calls."""
    spent, cache = 0.0, None
    for call in calls:
        if isinstance(call, Generation):
            spent += _generate(call)
            continue
        if call.step.index == 0:
            cache = call.side.new_cache() if call.cached else None
        x = input_of(call.side, call.case)[:, call.step.start : call.step.stop]
        if call.differentiated and x.is_floating_point():
            x = x.detach().requires_grad_()
        args, named = call.side.arguments(call.case, call.step, x, tables_of(call.side, call.case), cache)
        spent += _backward(call, x, args, named) if call.differentiated else _forward(call, args, named)
    return spent


def _forward(call: Call, args: tuple[Any, ...], named: dict[str, Any]) -> float:
    with torch.no_grad():
        start = time.process_time()
        call.side.module(*args, **named)
        return time.process_time() - start


def _backward(call: Call, x: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> float:
    leaves = [*call.side.parameters.values(), *([x] if x.requires_grad else [])]
    start = time.process_time()
    output = call.side.output(call.side.module(*args, **named))["output"]
    torch.autograd.grad(output, leaves, call.case.cotangent(output), allow_unused=True)
    return time.process_time() - start


def _generate(call: Generation) -> float:
    """The forwards inside a generation: its decoder and its head; choosing tokens and counting them is not theirs."""
    starts: list[float] = []
    spent: list[float] = []
    handles = []
    for part in call.side.module.children():
        handles.append(part.register_forward_pre_hook(lambda *_: starts.append(time.process_time())))
        handles.append(part.register_forward_hook(lambda *_: spent.append(time.process_time() - starts.pop())))
    with torch.no_grad():
        call.side.generate(*call.args)
    for handle in handles:
        handle.remove()
    return sum(spent)
