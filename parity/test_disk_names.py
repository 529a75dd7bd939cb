"""Both sides' tensors are, by name, shape and value, what the reference writes to disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parity import family as families
from parity.pair import on_disk, pair_of

pytestmark = pytest.mark.parity

SEED = 3
MODEL_TYPES = [name for name in families.names() if any(layer.generates for layer in families.load(name).layers)]
CHANGES = {"mixtral": (("layers", 2),), "deepseek_v3": (("dense", 1), ("layers", 3))}
"""More than one layer, and of each kind."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_both_sides_convert_to_what_the_reference_writes(model_type: str, tmp_path: Path) -> None:
    layer = next(layer for layer in families.load(model_type).layers if layer.generates)
    pair = pair_of(model_type, layer.name, CHANGES.get(model_type, ()))
    reference, candidate = pair.reference(torch.float32), pair.candidate(torch.float32)
    for side in (reference, candidate):
        pair.ready(side, SEED)
    reference.module.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for side in (reference, candidate):
        converted = {layer.at + name: tensor for name, tensor in on_disk(side, side.slots).items()}
        assert converted.keys() == written.keys()
        assert all(torch.equal(converted[name], written[name]) for name in written)
