"""A whole tiny checkpoint: the configuration of a model type, and a tensor for each name on disk."""

import tempfile
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from torch import Tensor

from parity.tiny import initialise, sizes


def checkpoint(model_type: str, seed: int = 0, **changes: Any) -> tuple[sizes.Config, dict[str, Tensor]]:
    """Build one, reproducibly: config.json's contents and tensors representable in bfloat16.

    Args:
        model_type: Hugging Face's name.
        seed: names the weights.
        changes: configuration fields that shall not have their lopsided value.
    """
    config = sizes.config(model_type, **changes)
    architecture, shapes = skeleton(config)
    plan = initialise.plan(dict(sorted(shapes.items())), model_type)
    return {"architectures": [architecture], **config}, initialise.fill(plan, seed)


def skeleton(config: sizes.Config) -> tuple[str, dict[str, initialise.Shape]]:
    """The name of the language model of a configuration, and names and shapes as it writes them to disk.

    Of a model type that has two, it is the one which fills in masked tokens. Names on disk are the same in every
    version of transformers, while those in memory are not; so it is asked to write.
    """
    fields = transformers.AutoConfig.for_model(**config)
    masked = type(fields) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model = auto.from_config(fields)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with safe_open(Path(directory, "model.safetensors"), framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    return type(model).__name__, shapes
