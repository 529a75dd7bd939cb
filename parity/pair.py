"""A candidate layer beside its reference: built once per configuration, refilled in place for every scenario."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from functools import cached_property, lru_cache, partial
from itertools import cycle
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from parity import family as families
from parity import routing
from parity.candidate import Candidate
from parity.case import OF_MEMORY, Case, Step, by_token
from parity.compare import Judgement, Quantity, Record, Unequal, judge
from parity.family import Family, Kind, Layer
from parity.oracle import lifted
from parity.reference import Reference
from parity.scenario import DTYPES, AxisValue, Scenario, ScenarioError
from parity.sources import source_of
from parity.tiny import draw, initialise
from reimpl.weights import to_disk, to_module

Side = Reference | Candidate


class Pair:
    """One layer under one configuration: the truth, the reference in every dtype, and the candidate in every dtype.

    Raises:
        FamilyError, ScenarioError: if the family has no such axis or choice.
    """

    def __init__(self, family: Family, layer: Layer, values: Mapping[str, AxisValue]) -> None:
        self.family, self.layer = family, layer
        self.point = family.point(layer, values)
        self.source = source_of(family)
        self.reference_config = self.source.make_config(family.configure(self.point))
        self._references: dict[torch.dtype, Reference] = {}
        self._plans: dict[str, initialise.Plan] = {}
        self._filled: WeakKeyDictionary[Side, int] = WeakKeyDictionary()
        self._fresh: WeakKeyDictionary[Side, dict[nn.Module, dict[str, Any]]] = WeakKeyDictionary()
        self.renew()
        _ = self.config  # what is wrong with it is said at once

    @cached_property
    def config(self) -> Any:
        """The configuration as our side reads it."""
        return self.family.config.from_dict(self.reference_config.to_dict())

    def renew(self) -> None:
        """Have our side read its configuration and be built anew; nothing that was settled about it holds on."""
        vars(self).pop("config", None)
        self._candidates: dict[torch.dtype, Candidate] = {}
        self._settled: set[Hashable] = set()
        for sides in (self._filled, self._fresh):
            for side in [side for side in sides if isinstance(side, Candidate)]:
                del sides[side]

    def beside(self, layer: Layer | None = None) -> Pair:
        """Another pair on the same references, whose candidate is built anew, of another layer if one is given."""
        other = copy(self)
        vars(other).pop("config", None)
        other.layer, other._candidates, other._settled = layer or self.layer, {}, set()
        return other

    def reference(self, dtype: torch.dtype) -> Reference:
        """The reference in a dtype; in float64 it is the one the truth is taken from."""
        if dtype not in self._references:
            self._references[dtype] = self.source.side(self.family, self.layer, self.reference_config, dtype)
        return self._references[dtype]

    def candidate(self, dtype: torch.dtype) -> Candidate:
        """Our layer in a dtype."""
        if dtype not in self._candidates:
            self._candidates[dtype] = Candidate(self.family, self.layer, self.config, self.point, dtype)
        return self._candidates[dtype]

    @property
    def plan(self) -> initialise.Plan:
        """How the weights are drawn: a distribution for every tensor, by the role that its name on disk tells."""
        if self.layer.at not in self._plans:  # shared with all pairs beside this one
            self._plans[self.layer.at] = self._drawn()
        return self._plans[self.layer.at]

    def _drawn(self) -> initialise.Plan:
        shapes = {
            self.layer.at + name: tuple(slot.shape)
            for name, slot in on_disk(self.reference(torch.float64), self.reference(torch.float64).slots).items()
        }
        return initialise.plan(shapes, self.family.model_type)

    def case(self, scenario: Scenario) -> Case:
        """The tensors of a scenario.

        Raises:
            ScenarioError: if it is none for this layer under this configuration.
        """
        config, limit = self.reference_config, self.family.positions
        window = self.layer.window(config)
        types = 0 if self.family.token_types is None else self.family.token_types(config)
        if self.layer.kind.attends and not self.layer.causal and len(scenario.schedule) > 1:
            raise ScenarioError(f"tokens of {self.layer} see those after them: give all in one chunk")
        if any(scenario.padding) and self.layer.kind.attends and not self.layer.masks:
            raise ScenarioError(f"{self.layer} cannot tell padding from tokens: leave {scenario.side} out")
        if self.layer.counts and (scenario.offset or scenario.packing or scenario.masked_positions):
            raise ScenarioError(f"{self.layer} counts positions itself: leave @, packed, masked out")
        if self.layer.recurrent and (scenario.offset or scenario.packing or scenario.masked_positions):
            raise ScenarioError(f"{self.layer} is a recurrence, which counts no positions: leave @, packed, masked out")
        if self.family.tokens is not None and scenario.length != self.family.tokens(self.point):
            raise ScenarioError(f"rows have {self.family.tokens(self.point)} tokens under this configuration, no other")
        if scenario.columns and self.layer.kind is not Kind.IMAGE:
            raise ScenarioError(f"{self.layer} is given no images: leave w out")
        if bool(scenario.memory) > self.family.has_memory(self.layer, self.point):
            raise ScenarioError(f"{self.layer} attends to no memory under this configuration: leave m out")
        if self.layer.must_remember and not scenario.memory:
            raise ScenarioError(f"{self.layer} attends to a memory: give it one, as in 'm5'")
        if scenario.typed and not types:
            raise ScenarioError(f"{self.family.model_type} knows no types of tokens: leave 'typed' out")
        if self.layer.kind in (Kind.POINTWISE, Kind.CROSS) and _tells_tokens_apart(scenario):
            raise ScenarioError(
                f"{self.layer} knows no positions and no padding: leave left, right, inner, packed, masked and @ out"
            )
        if limit is not None and scenario.offset + scenario.length > limit:
            raise ScenarioError(f"{self.family.model_type} has {limit} positions here: lower @ or shorten the rows")
        return Case(scenario, self.layer, self.layer.width(config), getattr(config, "vocab_size", 1), window, types)

    def ready(self, side: Side, seed: int) -> None:
        """Fill one side with the weights of a seed, unless it holds them, and wind its rotary tables back.

        Raises:
            KeyError, WeightError: if the side has a parameter that the checkpoint lacks, naming it.
        """
        if self._filled.get(side) != seed and side.slots:
            self.load(side, initialise.fill(self.plan, seed), seed)
        if self._remembers:
            self._rewind(side)

    def load(self, side: Side, weights: Mapping[str, Tensor], seed: int) -> None:
        """Write given weights, by their names on disk, into one side; it counts as filled with the seed."""
        given = to_module(weights, side.rules) if side.rules else weights
        with torch.no_grad():
            for name, slot in side.slots.items():
                slot.copy_(given[side.place + name])
        side.loaded()
        self._filled[side] = seed

    def forget(self) -> None:
        """Let every side be filled again."""
        self._filled.clear()

    @cached_property
    def _remembers(self) -> bool:
        """Whether rotary frequencies depend on what was computed before (gap dynamic-history): all runs begin alike."""
        rope = getattr(self.reference_config, "rope_parameters", None) or {}
        return rope.get("rope_type") in ("dynamic", "longrope")

    def _rewind(self, side: Side) -> None:
        if side not in self._fresh:
            self._fresh[side] = {module: _state(module) for module in side.rotary_modules()}
        for module, state in self._fresh[side].items():
            vars(module).update({name: deepcopy(value) for name, value in state.items()})

    def once(self, key: Hashable, judge: Callable[[], list[Judgement]]) -> list[Judgement]:
        """Judge what does not depend on the numbers, until it has held once."""
        if key in self._settled:
            return []
        judgements = judge()
        if all(judgement.holds for judgement in judgements):
            self._settled.add(key)
        return judgements

    @cached_property
    def implementations(self) -> Sequence[Mapping[str, str]]:
        """The reference's ways to compute, as far as they can differ in this layer."""
        matters = {"_attn_implementation": self.layer.kind.attends, "_experts_implementation": self.layer.routes}
        ways = [
            {field: choice for field, choice in way.items() if matters.get(field, True)}
            for way in self.family.implementations
        ]
        return [way for index, way in enumerate(ways) if way not in ways[:index]]

    def implementations_of(self, side: Reference) -> Sequence[Mapping[str, str]]:
        """Those that one side has."""
        return [way for way in self.implementations if side.can(way)]


def _tells_tokens_apart(scenario: Scenario) -> bool:
    """Whether a scenario says anything of the places of its tokens."""
    return bool(any(scenario.padding) or scenario.packing or scenario.masked_positions or scenario.offset)


def on_disk(side: Side, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of one side by the names, and in the shapes, that they have on disk, below the layer's place there."""
    if not side.rules:
        return tensors
    converted = to_disk({side.place + name: tensor for name, tensor in tensors.items()}, side.rules)
    return {name.removeprefix(side.layer.at): tensor for name, tensor in converted.items()}


def _state(module: nn.Module) -> dict[str, Any]:
    """A copy of a module's own state; its configuration is not among what a forward changes."""
    return {name: deepcopy(value) for name, value in vars(module).items() if name != "config"}


_KEPT: WeakSet[Pair] = WeakSet()


@lru_cache(maxsize=64)
def pair_of(model_type: str, layer: str, config: tuple[tuple[str, AxisValue], ...] = ()) -> Pair:
    """The pair for a configuration, kept between scenarios."""
    family = families.load(model_type)
    pair = Pair(family, family.layer(layer), dict(config))
    _KEPT.add(pair)
    return pair


def renew_pairs() -> None:
    """Have every pair that is kept build our side anew; the references stay as they are."""
    for pair in _KEPT:
        pair.renew()


Measure = Callable[[Side, Case], Record]


def forward(side: Side, case: Case) -> Record:
    """Outputs of every step, and after every step the whole cache."""
    record = Record([], [], [])
    with torch.no_grad():
        cache = side.new_cache() if case.cached else None
        tables, x = tables_of(side, case), input_of(side, case)
        for step in case.steps:
            for name, value in side(case, step, case.part(x, step), tables, cache).items():
                _note(record, case, Quantity(name, "output", step.index), value)
            for name, value in [] if cache is None else side.cache_contents(cache):
                _note(record, case, Quantity(name, "cache", step.index), value)
    return record


def one_pass(side: Side, case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What gradients are taken of and through one pass over all tokens: inputs by name, and results."""
    x, memory, tables = input_of(side, case), case.memories(side.dtype, case.steps[0]), tables_of(side, case)
    inputs = {"input": x.detach().requires_grad_()} if x.is_floating_point() else {}
    if memory is not None:
        inputs["memory"] = memory.detach().requires_grad_()
        case = case.varied(memory=inputs["memory"])
    results = side(case, Step(0, 0, case.scenario.length), inputs.get("input", x), tables, None)
    return inputs, list(results.values())


def differentiate(case: Case, results: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of what results are multiplied with to get a scalar; zero where nothing leads to a result."""
    cotangents = [case.cotangent(result) for result in results]
    return torch.autograd.grad(list(results), list(values), cotangents, allow_unused=True, materialize_grads=True)


def gradients(side: Side, case: Case) -> Record:
    """Gradients of inputs and of every parameter, through one pass over all tokens. A missing one counts as zero."""
    inputs, results = one_pass(side, case)
    leaves = inputs | side.parameters
    of_leaf = dict(zip(leaves, differentiate(case, results, list(leaves.values())), strict=True))
    record = Record([], [], [])
    for name in inputs:
        _note(record, case, Quantity(f"gradient of {name}", "gradient"), of_leaf[name])
    for name, value in on_disk(side, {name: of_leaf[name] for name in side.parameters}).items():
        _note(record, case, Quantity(f"gradient of {name}", "gradient"), value)
    return record


def _note(record: Record, case: Case, quantity: Quantity, value: Tensor) -> None:
    record.quantities.append(quantity)
    record.values.append(value)
    record.valid.append(entries_of(case, quantity, value, case.valid))


def entries_of(case: Case, quantity: Quantity, value: Tensor, tokens: Tensor | None) -> Tensor | None:
    """Which entries of a quantity are those of some tokens, [rows, length]; None: all of them. A memory has its own."""
    step = case.steps[quantity.step]
    if quantity.name == "gradient of memory":
        return None if case.memory_valid is None else case.memory_valid[..., None]
    if OF_MEMORY in quantity.name:
        return None if case.memory_valid is None else case.memory_valid[:, None, :, None]
    if tokens is None or (quantity.verdict == "gradient" and quantity.name != "gradient of input"):
        return None
    if quantity.verdict == "cache" and case.layer.recurrent:  # all tokens so far have a part in a state
        untouched = tokens if case.valid is None else tokens | ~case.valid
        return untouched[:, : step.stop].all(dim=1).view(-1, *[1] * (value.ndim - 1)).expand_as(value)
    if quantity.verdict == "cache":
        return tokens[:, None, step.stop - value.shape[2] : step.stop, None]
    return by_token(tokens if quantity.verdict == "gradient" else tokens[:, step.start : step.stop], value)


def input_of(side: Side, case: Case) -> Tensor:
    return case.ids if case.layer.kind.reads_ids else case.inputs(side.dtype)


def tables_of(side: Side, case: Case) -> Any:
    return case.tables.get(side.dtype)


def evaluate(
    pair: Pair, scenario: Scenario, measures: Iterable[Measure] = (forward,), case: Case | None = None
) -> list[Judgement]:
    """Judge the candidate in every dtype of a scenario; the truth is computed once and serves them all.

    Raises:
        Unequal: if the two sides do not have the same tensors.
    """
    case = case or pair.case(scenario)
    judgements = []
    for measure in measures:
        truth = run_truth(pair, case, measure)
        for name in scenario.dtypes:
            form_arguments(pair, case, DTYPES[name])
            before = versions(case)
            candidate = run_candidate(pair, case, measure, DTYPES[name])
            judgements += judge_side_effects(before, versions(case), name)
            judgements += hold_against(pair, case, measure, truth, candidate, name)
    return judgements


def hold_against(
    pair: Pair, case: Case, measure: Measure, truth: Record, candidate: Record, name: str
) -> list[Judgement]:
    """Judge a candidate's record against the truth, below float64 with the reference's errors as the yardstick.

    Where that fails, the yardstick gets a second look: the reference's error when its weights and inputs are off by one
    unit in the last place. No correct implementation can promise less, and it tells a mistake from a value that lies on
    a kink (ReLU's gradient) or in an ill-conditioned place, where the reference is right by luck.

    Where tokens are routed, truth and reference are made to choose as the candidate did, and its choices are judged.
    """
    dtype, told = DTYPES[name], routing.agreed(candidate, truth)
    if not routing.obeyed(truth, told):
        truth = run_truth(pair, case, measure, told)
    references = [] if dtype is torch.float64 else run_references(pair, case, measure, dtype, told)
    judgements = judge_records(pair, case, truth, candidate, references, name)
    if dtype is torch.float64 or all(judgement.holds for judgement in judgements):
        return judgements
    references += run_disturbed(pair, pair.reference(dtype), case, measure, told)
    return judge_records(pair, case, truth, candidate, references, name)


def judge_records(
    pair: Pair, case: Case, truth: Record, candidate: Record, references: Sequence[Record], name: str
) -> list[Judgement]:
    """Judge the values of a candidate's record and, where tokens are routed, what it chose."""
    judgements = judge(truth, candidate, references, DTYPES[name], name)
    if pair.layer.routes:
        judgements += routing.judge(case, truth, candidate, references, DTYPES[name], name)
    return judgements


DISTURBANCES = 16


def run_disturbed(
    pair: Pair, side: Side, case: Case, measure: Measure, told: routing.Told, times: int = DISTURBANCES
) -> list[Record]:
    """A side with every weight and input moved by at most one unit in the last place of its dtype."""
    dtype, seed = side.dtype, case.scenario.seed
    weights = initialise.fill(pair.plan, seed) if side.parameters else {}
    records = []
    ways = pair.implementations_of(side) if isinstance(side, Reference) else ({},)
    for number, way in zip(range(times), cycle(ways), strict=False):
        if isinstance(side, Reference):
            side.use(way)
        stream = f"disturbance {number}"
        near = {name: moved(value, dtype, seed, f"{stream} of {name}") for name, value in weights.items()}
        pair.load(side, near, seed)
        memory = None if case.memory is None else moved(case.memory, dtype, seed, f"{stream} of the memory")
        other = case.varied(x=moved(case.x, dtype, seed, stream), memory=memory)
        tabulate(pair, other, dtype)
        records.append(_run(pair, side, other, measure, told))
    pair.forget()
    return records


def moved(value: Tensor, dtype: torch.dtype, seed: int, stream: str) -> Tensor:
    """Each number, or one of its two neighbours in the dtype."""
    steps = draw.tokens(value.shape, 3, seed, stream) - 1
    return value.double() * (1 + torch.finfo(dtype).eps * steps)


NOTHING_TOLD: routing.Told = MappingProxyType({})


def _run(pair: Pair, side: Side, case: Case, measure: Measure, told: routing.Told = NOTHING_TOLD) -> Record:
    """What a side computes, beside what its routers chose of themselves or were told to."""
    if not pair.layer.routes:
        return measure(side, case)
    return routing.watched(partial(measure, side, case), told)


def run_truth(pair: Pair, case: Case, measure: Measure, told: routing.Told = NOTHING_TOLD) -> Record:
    """The float64 truth of a case."""
    side = pair.reference(torch.float64)
    side.use(pair.family.implementations[0])
    tabulate(pair, case, torch.float64)
    pair.ready(side, case.scenario.seed)
    with lifted():
        return _run(pair, side, case, measure, told)


def run_references(
    pair: Pair, case: Case, measure: Measure, dtype: torch.dtype, told: routing.Told = NOTHING_TOLD
) -> list[Record]:
    """The reference in a dtype, once per implementation of its own."""
    side = pair.reference(dtype)
    tabulate(pair, case, dtype)
    records = []
    for implementation in pair.implementations_of(side):
        side.use(implementation)
        pair.ready(side, case.scenario.seed)
        records.append(_run(pair, side, case, measure, told))
    return records


def run_candidate(pair: Pair, case: Case, measure: Measure, dtype: torch.dtype) -> Record:
    """The candidate in a dtype."""
    tabulate(pair, case, dtype)
    return measured(pair, pair.candidate(dtype), case, measure)


def measured(
    pair: Pair, side: Candidate, case: Case, measure: Measure, told: routing.Told = MappingProxyType({})
) -> Record:
    """What a candidate computes, its routers told what to choose where anything is told.

    Raises:
        Unequal: if it raises something itself.
    """
    pair.ready(side, case.scenario.seed)
    try:
        return _run(pair, side, case, measure, told)
    except Exception as error:
        raise Unequal(f"the candidate raises {type(error).__name__} in {side.dtype}: {error}") from error


def tabulate(pair: Pair, case: Case, dtype: torch.dtype) -> None:
    """Leave the reference's rotary tables with the case, for both sides to be called with."""
    if dtype in case.tables:
        return
    side = pair.reference(dtype)
    pair.ready(side, case.scenario.seed)
    with lifted() if dtype is torch.float64 else nullcontext(), torch.no_grad():
        tables = side.tables(case)
    if tables is not None:
        case.tables[dtype] = tables


def form_arguments(pair: Pair, case: Case, dtype: torch.dtype) -> None:
    """Form what a layer is called with in a dtype: only then can it be seen whether the layer writes to it."""
    tabulate(pair, case, dtype)
    if not case.layer.kind.reads_ids:
        case.inputs(dtype)
    case.memories(dtype, case.steps[0])


def versions(case: Case) -> dict[str, int]:
    """How often each tensor that a layer is called with has been written to."""
    return {name: tensor._version for name, tensor in case.arguments().items()}


def judge_side_effects(before: Mapping[str, int], after: Mapping[str, int], name: str) -> list[Judgement]:
    """Nothing that a layer was called with may be written to."""
    writes = {argument: after[argument] - count for argument, count in before.items()}
    return [
        Judgement(Quantity(f"writes to {argument}", "side effects"), name, count, count, 0.0, 0.0)
        for argument, count in writes.items()
    ]
