"""Every known gap shows on the installed reference alone, and right beside it there is none.

Reference is held against reference, so a test fails as soon as the reference changes: then the gap's range of versions
gets an end, and what steps around it can go. No candidate takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity import family as families
from parity import gaps
from parity.compare import TRUTH_BOUND
from parity.demonstrations import DEMONSTRATIONS
from parity.gaps import GAPS, Gap, Place
from parity.gaps.gap import nowhere
from parity.pair import pair_of
from parity.property import properties
from parity.scenario import Scenario, parse_scenario
from parity.strategies import Pool

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[1]

for_every_gap = pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.name)


@for_every_gap
def test_shows_on_the_installed_reference_and_not_beside(gap: Gap) -> None:
    package = gap.versions[0].partition(">")[0]
    here = f"{package} {version(package)}"
    if not gap.known:
        pytest.skip(f"{gap.name} is known in {gap.range}, and {here} is installed")
    shown, beside = DEMONSTRATIONS[gap.name](True), DEMONSTRATIONS[gap.name](False)
    assert shown > TRUTH_BOUND, f"{gap.name} shows no more in {here}: end its range of versions in parity/gaps"
    assert beside <= TRUTH_BOUND, f"beside {gap.name} the reference contradicts itself, too, by {beside:.1e}"


PLACES: Mapping[str, tuple[str, str, str]] = {
    "latent-eps": ("deepseek_v3", "block", "eps=0.01 s4 #1"),
    "window-of-one": ("qwen3", "attention", "window=1 s4,1 #1"),
    "packed-cache": ("llama", "model", "s3,1 packed2,2 #1"),
    "dynamic-chunks": ("llama", "model", "rope=dynamic s4,1 @62 #1"),
    "longrope-chunks": ("llama", "logits", "rope=longrope s4,1 @12 #1"),
    "gpt2-scales": ("gpt2", "block", "by_layer=yes s4 #1"),
    "rwkv-rows": ("rwkv", "logits", "b2 s4 #1"),
    "rwkv-rescaled": ("rwkv", "model", "rescale=1 s4 #1"),
    "encoder-zeros": ("transformer", "encoder", "s3 right1 #1"),
}
"""A scenario in each gap that scenarios lead into."""
PROPERTIES = {"rwkv-rows": "generation", "rwkv-rescaled": "gradients"}
"""The property of which it is a scenario, where it is not that of chunks."""


def place_of(model_type: str, layer: str, scenario: Scenario, prop: str = "chunks") -> Place:
    pair = pair_of(model_type, layer, scenario.config)
    return Place(model_type, pair.layer, pair.reference_config, scenario, prop)


@pytest.mark.parametrize("name", PLACES)
def test_a_scenario_leads_in_and_the_one_outside_does_not(name: str) -> None:
    model_type, layer, line = PLACES[name]
    gap, scenario = next(gap for gap in GAPS if gap.name == name), parse_scenario(line)
    prop = PROPERTIES.get(name, "chunks")
    assert gap.applies(place_of(model_type, layer, scenario, prop))
    assert not gap.applies(place_of(model_type, layer, gap.outside(scenario), prop))


@for_every_gap
def test_is_entered_or_avoided_in_a_file_that_names_it(gap: Gap) -> None:
    assert gap.avoided or gap.applies is not nowhere
    if gap.avoided:
        assert gap.name in (ROOT / gap.avoided).read_text(encoding="utf-8")


@given(st.data())
def test_no_drawn_scenario_leads_into_a_gap_that_is_avoided(data: st.DataObject) -> None:
    family = families.load(data.draw(st.sampled_from(families.names()), label="family"))
    layer = data.draw(st.sampled_from(family.layers), label="layer")
    said = [prop for prop in properties().values() if prop.applies(family, layer)]
    prop = data.draw(st.sampled_from(said), label="property")
    scenario = data.draw(prop.scenarios(family, layer, Pool(dtypes=("f64",))), label="scenario")
    place = place_of(family.model_type, layer.name, scenario, prop.name)
    assert [gap.name for gap in gaps.at(place) if gap.avoided] == []


def test_layers_of_torch_are_recognised_by_their_class() -> None:
    layer = replace(families.load("transformer").layer("encoder_layer"), causal=True)
    padded = Scenario(schedule=(3,), padding=(1,))
    config = pair_of("transformer", "encoder_layer", ()).reference_config
    place = Place("transformer", layer, config, padded, "forward")
    assert [gap.name for gap in gaps.at(place)] == ["encoder-nan", "encoder-zeros"]
    assert not gaps.at(replace(place, scenario=gaps.ENCODER_NAN.outside(padded)))
