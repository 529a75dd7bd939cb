"""Sizes that follow from a configuration are those of the reference, built on the meta device, and of a real cache."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from parity import family as families
from parity import reference
from parity.family import Family
from parity.published import MODELS
from reimpl.config import ConfigError
from reimpl.size import COUNTED, Size, size

pytestmark = pytest.mark.parity

NO_SIZE = ("cross", "decoder", "rope")  # some rotary tables ask for values, which the meta device has none of
COUNTABLE = [name for name in families.names() if families.load(name).config in COUNTED]


def built(family: Family, fields: Any, device: str) -> Any:
    """The reference with its head. Unfused, all its products are seen; batched experts need no values."""
    config = reference.make_config(copy.deepcopy(fields))
    config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
    with torch.device(device):
        return reference.layer_class(family.model_type, family.layers[-1].reference)(config).eval()


def counted(family: Family, fields: Any) -> Size:
    return size(family.config.from_dict(reference.make_config(copy.deepcopy(fields)).to_dict()))


def agrees(family: Family, fields: Any, batch: int, length: int) -> None:
    ours, model = counted(family, fields), built(family, fields, "meta")
    assert ours.parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch, length, dtype=torch.long, device="meta"))
    assert ours.flops(batch, length) == counter.get_total_flops()


@pytest.mark.parametrize("name", COUNTABLE)
def test_parameters_and_flops_are_the_references(name: str) -> None:
    family = families.load(name)
    axes = {axis.name: st.sampled_from(axis.choices) for axis in family.axes if axis.name not in NO_SIZE}

    @settings(max_examples=6, deadline=None)
    @given(st.fixed_dictionaries(axes), st.integers(1, 3), st.integers(1, 9))
    def same(values: Any, batch: int, length: int) -> None:
        fields = family.configure(family.point(family.layers[-1], values))
        agrees(family, fields, batch, length)

    same()


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_the_parameters_and_flops_that_are_counted(name: str) -> None:
    agrees(families.load(MODELS[name]["model_type"]), MODELS[name], 1, 4)


@pytest.mark.parametrize("name", [name for name in COUNTABLE if name != "bert"])
def test_a_real_cache_holds_the_numbers_that_are_counted(name: str) -> None:
    family = families.load(name)
    fields = family.configure(family.point(family.layers[-1], {}))
    model, ours = built(family, fields, "cpu"), counted(family, fields)
    with torch.no_grad():
        returned = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True)
    cache = next(getattr(returned, name) for name in reference.CACHE_NAMES if hasattr(returned, name))
    assert sum(tensor.numel() for _, tensor in reference.cache_contents(cache)) == 3 * ours.cached


def test_deepseek_v3_keeps_576_numbers_per_token_and_layer_of_40960() -> None:
    ours = counted(families.load("deepseek_v3"), MODELS["deepseek-v3"])
    assert (ours.cached / 61, ours.expanded / 61) == (576, 40960)


def test_what_is_not_counted_is_refused() -> None:
    config = families.load("bert").config
    fields = {"vocab_size": 5, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    decoder = config.from_dict(fields | {"intermediate_size": 4, "is_decoder": True, "add_cross_attention": True})
    with pytest.raises(ConfigError, match="add_cross_attention"):
        size(decoder)
