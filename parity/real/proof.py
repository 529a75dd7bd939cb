"""The run: SmolLM2 as any trained model, then its rows of q and k as they are stored, rotated in their own pairs.

After it all-MiniLM-L6-v2, whose rows follow in the same table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from parity import family as families
from parity import property as properties
from parity import reference
from parity.checkpoint import Results
from parity.compare import Judgement, Quantity, Record, judge
from parity.properties.pairing import adjacent
from parity.property import Property
from parity.real import minilm, smollm2
from parity.real.packages import weights_file
from parity.real.smollm2 import Stored
from parity.scenario import Scenario
from parity.table import Bar
from parity.trained import Comparison, Trained, attempt, candidate_of
from reimpl.rope import half_order

DTYPES = ("f64", "f32", "bf16")
TEXT = """\
Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing \
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is \
a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the \
mouth; whenever it is a damp, drizzly November in my soul"""
SCHEDULE = (60, 1, 1, 1, 1)
"""The first 64 tokens of the text: a prefill, then four decoding steps."""
CONTROL = "the rows as they are stored differ when rotated in halves"


def prove(dtypes: Sequence[str], json: Path | None, console: Console) -> int:
    """Run it, print the table, and return the exit code: 0 if all holds, 1 for a mismatch.

    Raises:
        CheckpointError: if a package is missing.
        ReportError: if the report cannot be written.
    """
    file, weights = weights_file(smollm2.PACKAGE, ".gguf"), weights_file(minilm.PACKAGE, ".safetensors")
    results, controls = hold(file, dtypes, console)
    controls += minilm.hold(results, weights.parent, console)
    return results.conclude(json, console, controls)


def hold(file: Path, dtypes: Sequence[str], console: Console) -> tuple[Results, list[Bar]]:
    """The rows of SmolLM2, and the bar of its control: both are tried together with float64, which decides."""
    family = families.load("llama")
    stored, layer = Stored(file), family.layer("logits")
    theirs = reference.load(family, layer, file.parent, torch.float32, gguf_file=file.name)
    tokenizer = reference.tokenizer(file.parent, gguf_file=file.name)
    scenario = Scenario(schedule=SCHEDULE, dtypes=tuple(dtypes))
    trained = Trained(
        family,
        layer,
        scenario,
        candidate=stored.model,
        reference=lambda dtype: reference.cast(deepcopy(theirs), dtype),
        ids=torch.tensor([tokenizer(TEXT)["input_ids"][: scenario.length]]),
    )
    results = Results(trained, lambda smallest: f"make real ARGS='--dtype {smallest.dtypes[0]}'")
    controls = list[Bar]()
    results.print_header(console, file.stem)
    for name in dtypes:
        comparison = results.compare(name, console)
        if comparison is not None and name == "f64":
            add_weights(results, comparison, stored, theirs.state_dict())
            controls = add_pairing(results, comparison, stored)
            said = tokenizer.decode(comparison.candidate.tokens[0, scenario.length :])
            console.print(f"the text continues:{said}", markup=False, highlight=False)
    return results, controls


def add_weights(results: Results, comparison: Comparison, stored: Stored, theirs: Mapping[str, Tensor]) -> None:
    """Our reading of every tensor, q and k permuted, holds the reference's numbers; none may differ."""
    judgements = []
    for name, tensor in stored.rows("half").items():
        wrong = float((tensor != theirs[name]).sum())
        judgements.append(Judgement(Quantity(name, "output"), comparison.dtype, wrong, wrong, 0.0, 0.0))
    sentence = "has the reference's weights, once the rows of q and k are permuted"
    results.add(_named("weights", sentence), comparison, judgements)


def add_pairing(results: Results, comparison: Comparison, stored: Stored) -> list[Bar]:
    """The rows as they are stored give the same in the adjacent rotation, the cached keys permuted.

    Returns:
        The bar of the control: rotated in halves, the same rows must not give the same logits.
    """
    trained = replace(results.trained, candidate=lambda dtype: stored.model(dtype, "adjacent"))
    side, case, truth = candidate_of(trained, torch.float64), comparison.case, comparison.truth.record
    with adjacent(side.module):
        turned = keys_in_half_order(attempt(side, case, 0).record, stored.config.head_dim)
    judgements = judge(truth, turned, [], torch.float64, comparison.dtype)
    results.add(properties.find("pairing"), comparison, judgements)
    halved = judge(truth, attempt(side, case, 0).record, [], torch.float64, comparison.dtype)
    missed = max(judgement.ratio for judgement in halved if judgement.quantity.name == "output")
    return [{"name": CONTROL, "value": missed, "unit": "times the allowance", "bar": 1.0, "holds": missed > 1}]


def keys_in_half_order(record: Record, head_dim: int) -> Record:
    """The record with the channels of all cached keys where a rotation of halves has them."""
    order = half_order(head_dim)
    return replace(
        record,
        values=[
            value[..., order] if quantity.name.endswith("keys") else value
            for quantity, value in zip(record.quantities, record.values, strict=True)
        ],
    )


def _named(name: str, sentence: str) -> Property:
    return replace(properties.find("forward"), name=name, sentence=sentence)
