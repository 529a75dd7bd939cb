"""A whole model with weights of its own, ours beside the reference's: hidden states, logits, caches, greedy tokens.

One model is in memory at a time: ours is read, run and let go of, then the reference is. The truth for a dtype is the
reference with the weights that it has in that dtype, lifted to float64, so that rounding the weights is nobody's error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from parity import routing
from parity.audit import Audit, judge_precision
from parity.candidate import Candidate
from parity.case import Case
from parity.compare import Judgement, Quantity, Record, Unequal, judge
from parity.family import Family, Kind, Layer
from parity.oracle import lifted
from parity.pair import NOTHING_TOLD, Side, entries_of, forward, judge_side_effects, versions
from parity.reference import Loaded, cast
from parity.scenario import DTYPES, Scenario


@dataclass(frozen=True)
class Trained:
    """A model, what it is run on, and how either side reads it in a dtype.

    Attributes:
        layer: the layer of the family that is the whole model.
        scenario: chunks, padding, dtypes, and the seed of the tokens.
        ids: the tokens, where they are not drawn; [rows, length].
        new_tokens: how many are generated, by a layer that does.
    """

    family: Family
    layer: Layer
    scenario: Scenario
    candidate: Callable[[torch.dtype], Any]
    reference: Callable[[torch.dtype], nn.Module]
    ids: Tensor | None = None
    new_tokens: int = 16

    def case(self, config: Any) -> Case:
        """The tensors that both sides are called with, under our configuration."""
        window = self.layer.window(config)
        types = 0 if self.family.token_types is None else self.family.token_types(config)
        case = Case(self.scenario, self.layer, config.hidden_size, config.vocab_size, window, types)
        return case.varied(ids=case.ids if self.ids is None else self.ids, positions=case.positions)


@dataclass(frozen=True)
class Run:
    """What one side computed: outputs and caches, the tokens it generated, the coarsest dtypes of its operations."""

    record: Record
    tokens: Tensor
    coarsest: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Comparison:
    """Both sides in one dtype, and what was judged of them. In float64 the reference runs but once, as the truth."""

    dtype: str
    case: Case
    truth: Run
    candidate: Run
    references: list[Run]
    forward: list[Judgement]
    generation: list[Judgement]


def compare(trained: Trained, name: str) -> Comparison:
    """Run both sides in a dtype. Tokens are generated in float64 only, since below it a near-tie may go either way.

    Raises:
        CheckpointError, ConfigError: if our side cannot read the model, before the reference is asked to.
        Unequal: if the two sides do not have the same tensors, or ours raises something.
    """
    dtype = DTYPES[name]
    new_tokens = trained.new_tokens if trained.layer.generates and dtype is torch.float64 else 0
    side = candidate_of(trained, dtype)
    case = trained.case(side.config)
    before = versions(case)
    ours = attempt(side, case, new_tokens)
    judgements = judge_side_effects(before, versions(case), name)
    del side  # makes room for the reference
    references, truth = _run_reference(trained, case, dtype, new_tokens, ours.record)
    sides = shared(trained.family, [run.record for run in (truth, ours, *references)])
    judgements += _judge(trained.layer, case, sides, name)
    judgements += judge_precision(ours.coarsest, _coarsest(references or [truth]), name)
    generation = [judge_tokens(ours.tokens, truth.tokens, name)] if new_tokens else []
    return Comparison(name, case, truth, ours, references, judgements, generation)


def candidate_of(trained: Trained, dtype: torch.dtype) -> Candidate:
    """Our side, read in a dtype.

    Raises:
        CheckpointError, ConfigError: if it cannot be read.
    """
    model = trained.candidate(dtype)
    layer = replace(trained.layer, candidate=lambda config: model)
    return Candidate(trained.family, layer, model.config, {}, dtype)


def attempt(side: Candidate, case: Case, new_tokens: int) -> Run:
    """What our side computes.

    Raises:
        Unequal: if it raises something itself.
    """
    try:
        return _run(side, case, new_tokens)
    except Exception as error:
        raise Unequal(f"the candidate raises {type(error).__name__} in {side.dtype}: {error}") from error


def _run_reference(
    trained: Trained, case: Case, dtype: torch.dtype, new_tokens: int, ours: Record
) -> tuple[list[Run], Run]:
    """The yardstick, a run of every implementation that the reference has, and the truth, all with the same weights.

    Where tokens are routed, all of them choose the experts that ours has chosen; the choice is judged apart.
    """
    family, layer, module = trained.family, trained.layer, trained.reference(dtype)
    told, runs = NOTHING_TOLD, list[Run]()
    if dtype is not torch.float64:
        side = Loaded(family, layer, module, dtype)
        for implementation in filter(side.can, family.implementations):
            side.use(implementation)
            told = told or _told(ours, side, case)
            runs.append(_run(side, case, 0, told))
    side = Loaded(family, layer, cast(module, torch.float64), torch.float64)
    side.use(family.implementations[0])
    with lifted():
        return runs, _run(side, case, new_tokens, told or _told(ours, side, case))


def _told(ours: Record, side: Side, case: Case) -> routing.Told:
    """The choices of ours, as far as the reference makes such choices too."""
    return routing.agreed(ours, _run(side, case, 0).record) if side.layer.routes else {}


def _run(side: Side, case: Case, new_tokens: int, told: routing.Told = NOTHING_TOLD) -> Run:
    with torch.no_grad(), _rewound(side):
        tokens = side.generate(case, new_tokens, use_cache=True, eos=None) if new_tokens else case.ids
    measure = partial(everything, side, case)
    with torch.no_grad(), _rewound(side), Audit() as audit:
        record = routing.watched(measure, told) if side.layer.routes else measure()
    return Run(record, tokens, audit.coarsest)


def _judge(layer: Layer, case: Case, sides: Sequence[Record], name: str) -> list[Judgement]:
    """Hold ours against the truth, with the reference's own runs as the yardstick.

    Below float64 all steps of a quantity are judged as one: the error that the reference makes with a single token is
    too small a sample to be a yardstick.
    """
    dtype = DTYPES[name]
    truth, ours, *references = sides if dtype is torch.float64 else map(pooled, sides)
    judgements = judge(truth, ours, references, dtype, name)
    return judgements + (routing.judge(case, truth, ours, references, dtype, name) if layer.routes else [])


@contextmanager
def _rewound(side: Side) -> Iterator[None]:
    """Let every run begin alike: rotary tables may remember how far they have been asked."""
    states = [
        (module, {name: deepcopy(value) for name, value in vars(module).items() if name != "config"})
        for module in side.rotary_modules()
    ]
    try:
        yield
    finally:
        for module, state in states:
            vars(module).update(state)


def everything(side: Side, case: Case) -> Record:
    """What `forward` records, and with it, by its path on disk, what every part put out that `part_at` knows."""
    inner = Record([], [], [])
    with ExitStack() as stack:
        for inside, part in side.module.named_modules():
            path = side.layer.at + inside
            if part_at(side.family, path) is not None:
                stack.callback(part.register_forward_hook(_noting(inner, path, case)).remove)
        whole = forward(side, case)
    return Record(inner.quantities + whole.quantities, inner.values + whole.values, inner.valid + whole.valid)


def _noting(record: Record, path: str, case: Case) -> Callable[[nn.Module, Any, Any], None]:
    steps = iter(case.steps)

    def hook(part: nn.Module, args: Any, returned: Any) -> None:
        quantity = Quantity(path, "output", next(steps).index)
        value = returned if isinstance(returned, Tensor) else returned[0]
        record.quantities.append(quantity)
        record.values.append(value)
        record.valid.append(entries_of(case, quantity, value, case.valid))

    return hook


def shared(family: Family, sides: Sequence[Record]) -> list[Record]:
    """The sides without those parts that not all of them run as one: some call what is inside a part by itself."""
    everywhere = set.intersection(*(set(side.quantities) for side in sides))
    return [
        _kept(side, [q in everywhere or part_at(family, q.name) is None for q in side.quantities]) for side in sides
    ]


def _kept(record: Record, keep: Sequence[bool]) -> Record:
    return replace(
        record,
        quantities=list(compress(record.quantities, keep)),
        values=list(compress(record.values, keep)),
        valid=list(compress(record.valid, keep)),
    )


def pooled(record: Record) -> Record:
    """All steps of a quantity as one, side by side along the axis of the tokens."""
    groups: dict[Quantity, list[int]] = {}
    for index, quantity in enumerate(record.quantities):
        groups.setdefault(replace(quantity, step=0), []).append(index)
    values = [torch.cat([record.values[i] for i in group], dim=-2) for group in groups.values()]
    valid = [_joined([record.valid[i] for i in group]) for group in groups.values()]
    return replace(record, quantities=list(groups), values=values, valid=valid)


def _joined(valid: list[Tensor | None]) -> Tensor | None:
    tensors = [each for each in valid if each is not None]
    return torch.cat(tensors, dim=-2) if tensors else None


def part_at(family: Family, path: str) -> Layer | None:
    """The layer of the family that stands at a path inside the whole model, if it makes hidden states of all tokens."""
    for layer in family.layers:
        anywhere = re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(layer.at))
        formed = (layer.kind.attends or layer.kind is Kind.EMBEDDINGS) and not layer.apart
        if formed and layer.at and re.fullmatch(anywhere, f"{path}."):
            return layer
    return None


def _coarsest(runs: list[Run]) -> dict[str, torch.dtype]:
    """Of every operation, the coarsest dtype that any of the runs used."""
    dtypes: dict[str, torch.dtype] = {}
    for run in runs:
        for operation, dtype in run.coarsest.items():
            dtypes[operation] = max(dtype, dtypes.get(operation, dtype), key=lambda each: torch.finfo(each).eps)
    return dtypes


def judge_tokens(ours: Tensor, theirs: Tensor, name: str) -> Judgement:
    """Count the tokens that differ; none may."""
    wrong = float((ours != theirs).sum())
    return Judgement(Quantity("greedy tokens", "output"), name, wrong, wrong, 0.0, 0.0)
