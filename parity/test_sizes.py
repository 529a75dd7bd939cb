"""Sizes that follow from a configuration are those of the reference, built on the meta device, and of a real cache."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity import corrections, reference, sizes
from parity import family as families
from parity.published import MODELS
from reimpl.config import ConfigError
from reimpl.size import size

pytestmark = pytest.mark.parity

NO_SIZE = ("cross", "decoder", "rope")  # some rotary tables ask for values, which the meta device has none of
COUNTABLE = sizes.counted()
POINT = families.load("fnet").point(families.load("fnet").layers[-1], {})


def counted(model: str) -> Any:
    return sizes.of(MODELS[model])


def agrees(fields: Any, batch: int, length: int) -> None:
    bars = sizes.held("model", fields, batch, length)
    assert len(bars) == 2
    assert [bar for bar in bars if not bar["holds"]] == []


@pytest.mark.parametrize("name", COUNTABLE)
def test_parameters_and_flops_are_the_references(name: str) -> None:
    family = families.load(name)
    axes = {axis.name: st.sampled_from(axis.choices) for axis in family.axes if axis.name not in NO_SIZE}

    @settings(max_examples=6, deadline=None)
    @given(st.fixed_dictionaries(axes), st.integers(1, 3), st.integers(1, 9))
    def same(values: Any, batch: int, length: int) -> None:
        agrees(family.configure(family.point(family.layers[-1], values)), batch, length)

    same()


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_the_parameters_and_flops_that_are_counted(name: str) -> None:
    agrees(MODELS[name], 1, 4)


@pytest.mark.parametrize("name", [name for name in COUNTABLE if name != "bert"])
def test_a_real_cache_holds_the_numbers_that_are_counted(name: str) -> None:
    family = families.load(name)
    fields = family.configure(family.point(family.layers[-1], {}))
    model = sizes.built(name, family.layers[-1].reference, fields)
    with torch.no_grad():
        returned = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True)
    cache = next(getattr(returned, name) for name in reference.CACHE_NAMES if hasattr(returned, name))
    tensors = [tensor.half() for _, tensor in reference.cache_contents(cache)]
    ours = size(family.config.from_dict(model.config.to_dict()))
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 3 * ours.cached * sizes.BYTES


def test_deepseek_v3_keeps_576_numbers_per_token_and_layer_of_40960() -> None:
    assert corrections.kept("deepseek-v3") == (576, 40960)


def test_what_is_not_counted_is_refused() -> None:
    config = families.load("bert").config
    fields = {"vocab_size": 5, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    decoder = config.from_dict(fields | {"intermediate_size": 4, "is_decoder": True, "add_cross_attention": True})
    with pytest.raises(ConfigError, match="add_cross_attention"):
        size(decoder)
    with pytest.raises(ConfigError, match=f"model_type fnet is not counted; counted are {', '.join(COUNTABLE)}"):
        size(families.load("fnet").config.from_dict(families.load("fnet").configure(POINT)))


class TestWhatIsOftenRead:
    """The figures of `parity/corrections.py`: those which are read are wrong, by as much as is said there."""

    def test_a_feed_forward_layer_takes_4_and_a_gated_one_6_per_channel_pair_and_token(self) -> None:
        assert corrections.feed_forward("gpt2", 768, 3072) == 4
        assert corrections.feed_forward("llama-2-7b", 4096, 11008) == 6

    def test_a_head_of_its_own_counts_the_vocabulary_a_second_time(self) -> None:
        for model, tied in (("llama-2-7b", False), ("qwen3-0.6b", True)):
            parts, fields = counted(model), MODELS[model]
            table = fields["vocab_size"] * fields["hidden_size"]
            assert (parts.part("embeddings").parameters, parts.part("head").parameters) == (table, 0 if tied else table)

    def test_more_is_used_than_the_share_of_the_chosen_experts(self) -> None:
        assert counted("mixtral-8x7b").used > 1.09 * counted("mixtral-8x7b").parameters * 2 / 8
        assert counted("deepseek-v3").used > 1.7 * counted("deepseek-v3").parameters * 8 / 256

    def test_latents_are_14_to_16_times_smaller_than_what_they_stand_for(self) -> None:
        small = sizes.of(corrections.LATENT)
        assert small.expanded == 2 * 32 * 128
        assert (small.expanded / 512, round(small.expanded / small.cached, 1)) == (16, 14.2)

    def test_llama_2_groups_its_heads_in_the_largest_only(self) -> None:
        assert corrections.kept("llama-2-7b") == (2 * 32 * 128, 2 * 32 * 128)
        assert corrections.kept("llama-2-70b") == (2 * 8 * 128, 2 * 64 * 128)

    @pytest.mark.parametrize(
        ("model", "billions"),
        {
            "gpt2": 0.124,
            "gpt2-xl": 1.558,
            "llama-2-7b": 6.738,
            "llama-2-70b": 68.977,
            "llama-3-405b": 405.853,
            "mixtral-8x7b": 46.703,
            "deepseek-v3": 671.026,
        }.items(),
    )
    def test_names_are_rounded(self, model: str, billions: float) -> None:
        assert round(counted(model).parameters / 1e9, 3) == billions

    def test_every_figure_has_its_command(self) -> None:
        found = corrections.corrections()
        assert len({each.read for each in found}) == len(found)
        assert {each.command.removeprefix("parity size").strip() for each in found} <= {"", *MODELS}
