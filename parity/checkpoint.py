"""Running checkpoints: a local one in Hugging Face's layout, or any trained model, with a table at the end.

Each part of the family in which tokens see each other has a row per dtype, with the worst of all its occurrences in the
model; the row of the whole model has the logits and the caches.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from parity import family as families
from parity import property as properties
from parity import reference
from parity.compare import Judgement, Unequal
from parity.family import Family, FamilyError, Layer
from parity.mismatch import Mismatch
from parity.property import Property
from parity.runner import Tally
from parity.scenario import Scenario, ScenarioError
from parity.table import Bar, bars, print_rows, write_json
from parity.trace import Divergence
from parity.trained import Comparison, Trained, compare, part_at
from parity.watch import Name
from reimpl.checkpoint import CONFIG_FILE, CheckpointError, Pretrained, read_config

SCENARIO = Scenario(
    batch=2,
    schedule=(24, 4, 1, 1, 1),
    side="left",
    padding=(0, 5),
    masked_positions=True,
    dtypes=("f64", "f32", "bf16"),
)
"""Two rows, one of them padded; a prefill, a chunk and three decoding steps."""


def run_checkpoint(directory: Path, scenario: Scenario, json: Path | None, console: Console) -> int:
    """Run a local checkpoint, print its table, and return the exit code: 0 if all holds, 1 for a mismatch.

    Raises:
        CheckpointError, ConfigError, FamilyError: if the checkpoint cannot be read.
        ScenarioError: if the scenario asks for another configuration than the checkpoint's.
    """
    if scenario.config:
        named = ", ".join(name for name, _ in scenario.config)
        raise ScenarioError(f"a checkpoint has a configuration of its own: leave {named} out of the scenario")
    command = f"parity run --checkpoint {shlex.quote(str(directory))}"
    trained = local(directory, scenario)
    results = Results(trained, lambda smallest: f"{command} --scenario '{smallest}'")
    results.print_header(console, str(directory))
    for name in trained.scenario.dtypes:
        results.compare(name, console)
    return results.conclude(json, console)


def local(directory: Path, scenario: Scenario) -> Trained:
    """A checkpoint in Hugging Face's layout, whose weights are not read yet.

    Raises:
        CheckpointError: if there is no such directory, or no readable config.json in it.
        FamilyError: if the model is of no known family.
    """
    family = _family(directory)
    layer = family.layers[-1]
    scenario = fitting(scenario, layer)
    model: type[Pretrained] = layer.candidate  # type: ignore[assignment]  # the whole model is a class of ours
    return Trained(
        family,
        layer,
        scenario,
        candidate=lambda dtype: model.from_checkpoint(directory, dtype),
        reference=lambda dtype: _reference(family, layer, directory, dtype),
    )


def fitting(scenario: Scenario, layer: Layer) -> Scenario:
    """The scenario without what there cannot be in a layer: chunks that its reference does not take, padding, dtypes.

    Where tokens see those after them there can be no chunks, so all of them come at once.
    """
    first, rest = scenario.schedule[0], scenario.length - scenario.schedule[0]
    if not layer.causal:
        scenario = replace(scenario, schedule=(scenario.length,))
    elif layer.most == 1:
        scenario = replace(scenario, schedule=(first, *[1] * rest))
    elif rest and min(scenario.schedule) < layer.fewest:
        scenario = replace(scenario, schedule=(first, rest) if rest >= layer.fewest else (scenario.length,))
    if not layer.masks:
        scenario = replace(scenario, padding=())
    kept = tuple(name for name in scenario.dtypes if name not in layer.left_out)
    masked = scenario.masked_positions and not layer.recurrent and layer.masks
    return replace(scenario, masked_positions=masked, dtypes=kept or scenario.dtypes)


def _family(directory: Path) -> Family:
    """The family that config.json names."""
    fields = read_config(directory)
    if "model_type" not in fields:
        known = ", ".join(families.names())
        raise FamilyError(f"{directory / CONFIG_FILE}: model_type is missing, which names the family: add it ({known})")
    try:
        return families.load(str(fields["model_type"]))
    except FamilyError as error:
        raise FamilyError(f"{directory / CONFIG_FILE}: {error}") from error


def _reference(family: Family, layer: Layer, directory: Path, dtype: torch.dtype) -> nn.Module:
    """The reference's reading, after ours has succeeded."""
    try:
        return reference.load(family, layer, directory, dtype)
    except Exception as error:
        said = " ".join(str(error).split())
        raise CheckpointError(f"{directory}: {reference.version()} cannot read this checkpoint: {said}") from error


class Departure(Mismatch):
    """A trained model that is not the reference's function; where the two part is seen in what was recorded."""

    def __init__(
        self,
        prop: Property,
        trained: Trained,
        dtype: str,
        failure: str | Sequence[Judgement],
        again: Callable[[Scenario], str],
        divergence: Divergence | None = None,
    ) -> None:
        super().__init__(prop, trained.family, trained.layer, trained.scenario.only(dtype), failure)
        self._command, self._divergence = again(self.scenario), divergence

    @cached_property
    def divergence(self) -> Divergence | None:
        return self._divergence

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        return ()

    def _where(self) -> str:
        return super()._where() if self.failed else "unknown: the two sides cannot be held against each other"

    def _cause(self) -> Iterator[tuple[str, str]]:
        """Nothing: mistakes are told by scenarios in which they show, and the weights of a checkpoint are not drawn."""
        return iter(())

    @property
    def again(self) -> str:
        return self._command


@dataclass
class Results:
    """The rows of a run so far.

    Attributes:
        again: the command line that runs one scenario of the model again.
    """

    trained: Trained
    again: Callable[[Scenario], str]
    rows: list[tuple[Family, Layer, Property]] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    def print_header(self, console: Console, what: str) -> None:
        """What is compared with what, on which input."""
        versions = f"{reference.version()}, torch {torch.__version__}"
        scenario = replace(self.trained.scenario, dtypes=Scenario.dtypes)
        console.print(f"{versions}; {what}; scenario {scenario}", highlight=False)

    def compare(self, name: str, console: Console) -> Comparison | None:
        """Run both sides in a dtype and add the rows; None if the two cannot be held against each other."""
        began, prop = time.perf_counter(), properties.find("forward")
        prop = replace(prop, name=f"{prop.name} {name}")
        try:
            with console.status(f"comparing in {name} ..."):
                comparison = compare(self.trained, name)
        except Unequal as unequal:
            mismatch = Departure(prop, self.trained, name, str(unequal), self.again)
            self._append(self.trained.layer, prop, Tally(mismatch=mismatch))
            return None
        self.add(prop, comparison, comparison.forward)
        self.tallies[-1].seconds = time.perf_counter() - began
        if comparison.generation:
            self.add(properties.find("generation"), comparison, comparison.generation)
        return comparison

    def add(self, prop: Property, comparison: Comparison, judgements: Sequence[Judgement]) -> None:
        """Add what was judged, a row for each layer that it speaks of, the whole model last."""
        parting = _parting(comparison, judgements)
        mismatch = Departure(prop, self.trained, comparison.dtype, judgements, self.again, parting)
        for layer in self.trained.family.layers:
            if found := [j for j in judgements if self._layer(j) is layer]:
                tally = Tally(mismatch=None if all(judgement.holds for judgement in found) else mismatch)
                tally.add(self.trained.scenario.only(comparison.dtype), found)
                self._append(layer, prop, tally)

    def conclude(self, json: Path | None, console: Console, controls: Sequence[Bar] = ()) -> int:
        """Print the table and the first mismatch, write the report, and return the exit code.

        Args:
            controls: bars beside those of the rows.

        Raises:
            ReportError: if the report cannot be written.
        """
        seconds = time.perf_counter() - self.start
        print_rows(console, self.rows, self.tallies, seconds)
        if first := next((tally.mismatch for tally in self.tallies if tally.mismatch is not None), None):
            console.print()
            console.print(str(first), markup=False, highlight=False)
        for bar in controls:
            verdict = "holds" if bar["holds"] else "FAILS"
            console.print(f"control {verdict}: {bar['name']}; {bar['value']:.0e} {bar['unit']}", highlight=False)
        if json is not None:
            write_json(json, self.rows, self.tallies, seconds, controls)
        return 0 if all(bar["holds"] for bar in [*bars(self.rows, self.tallies), *controls]) else 1

    def _append(self, layer: Layer, prop: Property, tally: Tally) -> None:
        self.rows.append((self.trained.family, layer, prop))
        self.tallies.append(tally)

    def _layer(self, judgement: Judgement) -> Layer:
        return part_at(self.trained.family, judgement.quantity.name) or self.trained.layer


def _parting(comparison: Comparison, judgements: Sequence[Judgement]) -> Divergence | None:
    """The first quantity that does not hold: by its step, within a step as they were recorded."""
    recorded = comparison.truth.record.quantities
    failed = [j.quantity for j in judgements if not j.holds and j.quantity in recorded]
    if not failed:
        return None
    first = min(failed, key=lambda quantity: quantity.step)
    return Divergence(Name(first.name), f"first departs at {first}")
