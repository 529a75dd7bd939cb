"""Every field of config.json is read, declared irrelevant or refused, in the spelling of each version."""

import re
from typing import Any

import pytest

from reimpl.config import GENERIC, ConfigError, with_rope_parameters
from reimpl.llama import LlamaConfig

SIZES = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}

# Trained models as they are published: one of the first Llama's, Llama 3.1's, SmolLM2's, with sizes of ours.
PUBLISHED: dict[str, dict[str, Any]] = {
    "first": {"torch_dtype": "float16", "pad_token_id": -1, "model_type": "llama"},
    "scaled": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "eos_token_id": [128001, 128008, 128009],
    },
    "converted": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_are_understood(name: str) -> None:
    config = LlamaConfig.from_dict(SIZES | PUBLISHED[name])
    assert config.rope_parameters["rope_theta"] == PUBLISHED[name].get("rope_theta", 10000.0)
    assert config.rope_parameters["rope_type"] == ("llama3" if name == "scaled" else "default")
    assert config.num_key_value_heads == (3 if name == "scaled" else 6)
    assert config.head_dim == 6


SPELLINGS: dict[str, dict[str, Any]] = {
    "4": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "4, before rope_type": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "4, with both": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
    "5": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "5, from a legacy file": {"rope_parameters": {"type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "both": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "both, one of them null": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        "rope_theta": None,
        "rope_scaling": None,
    },
}


@pytest.mark.parametrize("version", SPELLINGS)
def test_every_spelling_of_rope_means_the_same(version: str) -> None:
    assert with_rope_parameters(SPELLINGS[version]) == {"rope_parameters": SPELLINGS["5"]["rope_parameters"]}


def test_no_rope_fields_mean_the_first_rotation() -> None:
    assert with_rope_parameters({}) == {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def test_fields_beside_the_scaling_join_it() -> None:
    """transformers 4 kept the rotated part, and LongRoPE's original length, beside `rope_scaling`."""
    fields = {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}
    assert with_rope_parameters(fields)["rope_parameters"].items() >= fields.items()


@pytest.mark.parametrize("field", sorted(LlamaConfig.ONLY))
def test_a_field_with_one_value_accepts_no_other(field: str) -> None:
    LlamaConfig.from_dict(SIZES | {field: LlamaConfig.ONLY[field]})
    with pytest.raises(ConfigError, match=f"^{field} is 'other': this model computes {field} = "):
        LlamaConfig.from_dict(SIZES | {field: "other"})


def test_irrelevant_fields_change_nothing() -> None:
    plain = LlamaConfig.from_dict(SIZES)
    assert LlamaConfig.from_dict(SIZES | dict.fromkeys(LlamaConfig.IRRELEVANT, "anything")) == plain
    assert all(GENERIC.values())


@pytest.mark.parametrize("field", ["hidden_sizes", "sliding_window", "attention_multiplier", "_attn_implementation"])
def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown field {re.escape(repr(field))}"):
        LlamaConfig.from_dict(SIZES | {field: None})
