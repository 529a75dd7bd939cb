"""Tiny configurations, lopsided on purpose: no two axes of a layer share a size, so that a swap is an error of shape.

Values are chosen by the name of a configuration's field, so that a new family gets them without being listed here.
Fields that are not sizes get values that are not their defaults, since a field that is read but unused, or not read at
all, shows only then.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import transformers

Config = dict[str, Any]

SIZES: Mapping[str, int] = {
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
OTHERS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # With 8 channels the four wavelengths are 6, 30, 140 and 664: kept, blended, and two divided by the factor.
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@cache
def fields(model_type: str) -> frozenset[str]:
    """The fields of a model type's configuration, with rope keys in the spelling of transformers 5."""
    known = transformers.AutoConfig.for_model(model_type).to_dict().keys()
    return frozenset(known | {"rope_parameters"} if "rope_theta" in known else known)


def config(model_type: str, **changes: Any) -> Config:
    """The lopsided configuration of a model type, as keyword arguments of its configuration class.

    Rope keys are in the spelling of transformers 5.

    Args:
        model_type: Hugging Face's name.
        changes: fields that shall have another value.
    """
    known = fields(model_type)
    lopsided = {name: value for name, value in {**SIZES, **OTHERS}.items() if name in known}
    return {"model_type": model_type, **lopsided, **changes}
