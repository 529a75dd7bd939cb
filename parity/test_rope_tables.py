"""Rotary frequencies and tables are those of transformers to the last bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from parity import oracle, reference
from parity.compare import TRUTH_BOUND
from reimpl.rope import ROPE_TYPES, RotaryEmbedding, inverse_frequencies

pytestmark = pytest.mark.parity

FURTHEST = 131_072
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (16, 33, 64, 512, 4096, 8192)
agree = partial(torch.testing.assert_close, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)
for_every_type = pytest.mark.parametrize("rope_type", ROPE_TYPES)
for_types_that_read_the_length = pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])


@dataclass(frozen=True)
class Setting:
    """What both sides compute frequencies from."""

    rope: Mapping[str, Any]
    head_dim: int
    limit: int

    @property
    def original(self) -> int:
        return self.rope.get("original_max_position_embeddings", self.limit)

    def ours(self) -> RotaryEmbedding:
        return RotaryEmbedding(self.rope, self.head_dim, self.limit)

    def theirs(self, model_type: str = "llama") -> Any:
        fields = {
            "model_type": model_type,
            "hidden_size": 2 * self.head_dim,
            "num_attention_heads": 2,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.limit,
            "rope_parameters": self.rope,
        }
        name = f"{model_type.capitalize()}RotaryEmbedding"
        return reference.layer_class(model_type, name)(reference.make_config(fields))


FACTORS = st.sampled_from((1.0, 2, 8.0)) | st.floats(1, 40)
FIELDS: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
    "default": {},
    "linear": {"factor": FACTORS},
    "dynamic": {"factor": FACTORS},
    "yarn": {"factor": FACTORS | st.none()},
    "longrope": {},
    "llama3": {
        "factor": FACTORS,
        "low_freq_factor": st.floats(0.5, 2),
        "high_freq_factor": st.floats(2.5, 10),
        "original_max_position_embeddings": st.sampled_from(LENGTHS),
    },
    "proportional": {},
}
OPTIONS: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
    "yarn": {
        "original_max_position_embeddings": st.sampled_from(LENGTHS),
        "attention_factor": st.sampled_from((1.0, 0.7, 1.3)),
        "beta_fast": st.sampled_from((32, 16, 40.5)),
        "beta_slow": st.sampled_from((1, 2, 0.5)),
        "mscale": st.sampled_from((0, 0.707, 1.0)),
        "mscale_all_dim": st.sampled_from((0, 0.5, 1.0)),
        "truncate": st.booleans(),
    },
    "longrope": {
        "factor": FACTORS,
        "original_max_position_embeddings": st.sampled_from(LENGTHS),
        "attention_factor": st.sampled_from((1.0, 0.7, 1.3)),
    },
    "proportional": {"factor": FACTORS, "partial_rotary_factor": st.sampled_from((0.25, 0.5, 1.0))},
}
"""Per type, the fields it must have and those it may have."""


@st.composite
def settings(draw: st.DrawFn, rope_type: str, portions: tuple[float, ...] = (1.0,)) -> Setting:
    portion = draw(st.sampled_from(portions))
    head_dim = draw(st.integers(1, 16)) * (2 if portion == 1 else 8)
    fields = {"rope_type": rope_type, "rope_theta": draw(st.sampled_from((10000, 5e5)) | st.floats(2, 1e6))}
    if portion != 1:
        fields["partial_rotary_factor"] = portion
    fields |= draw(st.fixed_dictionaries(dict(FIELDS[rope_type]), optional=dict(OPTIONS.get(rope_type, {}))))
    if rope_type == "longrope":
        pairs = int(head_dim * portion) // 2
        for name in ("short_factor", "long_factor"):
            fields[name] = draw(st.lists(st.floats(1, 60), min_size=pairs, max_size=pairs))
    setting = Setting(fields, head_dim, draw(st.sampled_from(LENGTHS)))
    assume(rope_type != "dynamic" or int(head_dim * portion) != 2)  # both sides refuse it
    return setting


@for_every_type
@given(data=st.data())
def test_inverse_frequencies_are_bit_identical(rope_type: str, data: st.DataObject) -> None:
    setting = data.draw(settings(rope_type, portions=(1.0, 0.5, 0.75)))
    # Under the default type, which each family has for itself, Llama knows no partial width (gap partial-rotary).
    partial_default = rope_type == "default" and "partial_rotary_factor" in setting.rope
    theirs = setting.theirs("phi" if partial_default else "llama")
    frequencies, factor = inverse_frequencies(setting.rope, setting.head_dim, setting.limit)
    assert torch.equal(frequencies, theirs.inv_freq)
    assert frequencies.dtype is theirs.inv_freq.dtype
    assert factor == theirs.attention_scaling


@for_types_that_read_the_length
@given(data=st.data(), beyond=st.integers(1, FURTHEST))
def test_inverse_frequencies_for_a_length_are_bit_identical(rope_type: str, data: st.DataObject, beyond: int) -> None:
    setting = data.draw(settings(rope_type))
    last = torch.tensor([[max(setting.limit, setting.original) + beyond - 1]])
    theirs = setting.theirs()
    theirs(torch.zeros(1), last)
    frequencies, _ = inverse_frequencies(setting.rope, setting.head_dim, setting.limit, last.max() + 1)
    assert torch.equal(frequencies, theirs.inv_freq)


@for_every_type
@given(data=st.data(), positions=st.lists(st.integers(0, FURTHEST), min_size=1, max_size=9))
def test_tables_agree_at_positions_up_to_131072(rope_type: str, data: st.DataObject, positions: list[int]) -> None:
    setting = data.draw(settings(rope_type))
    check_calls(setting, [[positions], [[FURTHEST, *positions]]])


@for_every_type
@given(data=st.data(), positions=st.lists(st.integers(0, FURTHEST), min_size=1, max_size=9))
def test_tables_agree_with_the_truth(rope_type: str, data: st.DataObject, positions: list[int]) -> None:
    setting = data.draw(settings(rope_type))
    x, positions_ = torch.zeros(1, dtype=torch.float64), torch.tensor([positions])
    theirs = setting.theirs()
    with oracle.lifted():
        truth = theirs(x, positions_)
    agree(setting.ours()(x, positions_), truth)


@for_types_that_read_the_length
@given(data=st.data(), lengths=st.lists(st.sampled_from((-2, -1, 0, 1, 2, 50)), min_size=1, max_size=4))
def test_short_long_short_calls_agree(rope_type: str, data: st.DataObject, lengths: list[int]) -> None:
    setting = data.draw(settings(rope_type))
    edges = [edge + step for edge in (setting.original, setting.limit) for step in lengths]
    calls = [[[0, 1]], *([[0, edge - 1]] for edge in edges), [[0, 1]]]
    check_calls(setting, calls)


def check_calls(setting: Setting, calls: list[list[list[int]]]) -> None:
    """One module on each side; every call gives the same tables to the last bit, in every dtype."""
    ours, theirs = setting.ours(), setting.theirs()
    for call, dtype in product(calls, DTYPES):
        x, positions = torch.zeros(1, dtype=dtype), torch.tensor(call)
        for our_table, their_table in zip(ours(x, positions), theirs(x, positions), strict=True):
            assert torch.equal(our_table, their_table), f"positions {call} of {calls}"
            assert our_table.dtype is their_table.dtype


def test_every_position_up_to_131072_agrees() -> None:
    setting = Setting({"rope_type": "default", "rope_theta": 10000.0}, 10, FURTHEST)
    check_calls(setting, [[list(range(FURTHEST + 1))]])


def test_converting_a_model_keeps_the_frequencies() -> None:
    setting = Setting({"rope_type": "default", "rope_theta": 10000.0}, 8, FURTHEST)
    x, positions = torch.zeros(1), torch.tensor([[FURTHEST]])
    assert all(map(torch.equal, setting.ours().bfloat16()(x, positions), setting.ours()(x, positions)))


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown rope type 'ntk': known are default, linear, dynamic, yarn"):
        inverse_frequencies({"rope_type": "ntk", "rope_theta": 10000.0}, 8, 64)


@pytest.mark.parametrize(("rope_type", "field"), [("default", "rope_theta"), ("linear", "factor")])
def test_a_missing_field_is_named(rope_type: str, field: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, field: None}
    with pytest.raises(ValueError, match=f"rope type '{rope_type}' needs the field '{field}'"):
        inverse_frequencies(rope, 8, 64)
