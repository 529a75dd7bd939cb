"""Checkpoints as they were written years ago are read as the reference reads them.

The first GPT-2 was saved without its head, hence without the names in front, but with its causal masks; the first BERT
with other names for gains and biases, with its position ids, a pooler and a head for pairs of sentences.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity import reference
from parity.compare import TRUTH_BOUND
from parity.tiny import draw
from parity.tiny.checkpoint import checkpoint
from parity.tiny.write import write
from reimpl.bert import BertForMaskedLM
from reimpl.checkpoint import Pretrained
from reimpl.gpt2 import GPT2LMHeadModel

pytestmark = pytest.mark.parity

Tensors = dict[str, Tensor]


def gpt2(tensors: Tensors) -> Tensors:
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks


def bert(tensors: Tensors) -> Tensors:
    size = tensors["bert.embeddings.LayerNorm.weight"].numel()
    named = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    return named | {
        "bert.embeddings.position_ids": torch.arange(64)[None],
        "bert.pooler.dense.weight": torch.ones(size, size),
        "bert.pooler.dense.bias": torch.ones(size),
        "cls.seq_relationship.weight": torch.ones(2, size),
        "cls.seq_relationship.bias": torch.ones(2),
    }


@pytest.mark.parametrize(("old", "model"), [(gpt2, GPT2LMHeadModel), (bert, BertForMaskedLM)])
def test_gives_the_same_logits(old: Callable[[Tensors], Tensors], model: type[Pretrained], tmp_path: Path) -> None:
    config, tensors = checkpoint(old.__name__, tie_word_embeddings=True)
    write(tmp_path, config, old(tensors), dtype=torch.float64)
    family = families.load(old.__name__)
    theirs = reference.load(family, family.layer(model.__name__), tmp_path, torch.float64)
    ids = draw.tokens((2, 20), config["vocab_size"], 0, "ids")
    with torch.no_grad():
        ours = model.from_checkpoint(tmp_path, torch.float64)(ids)
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)
