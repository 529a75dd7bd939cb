"""Attention, experts and norms written a second time, unlike reimpl, and able to make the catalogue's mistakes.

Without these, a diagnosis would be tried on our own layers only, and could do no better than recognise them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from parity.meta.second.encoder import EncoderAttention
from parity.meta.second.experts import SigmoidExperts, SoftmaxExperts
from parity.meta.second.grouped import GroupedAttention
from parity.meta.second.latent import LatentAttention
from parity.meta.second.norm import Norm
from parity.meta.second.packed import PackedAttention
from parity.meta.second.part import Part
from parity.pair import Pair, pair_of
from parity.scenario import AxisValue

GROUPED = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
SECOND: dict[tuple[str, str], type[Any]] = {
    **{(model, "attention"): GroupedAttention for model in GROUPED},
    **{(model, "norm"): Norm for model in (*GROUPED, "deepseek_v3")},
    ("deepseek_v3", "attention"): LatentAttention,
    ("gpt2", "attention"): PackedAttention,
    ("bert", "attention"): EncoderAttention,
    ("mixtral", "moe"): SoftmaxExperts,
    ("deepseek_v3", "moe"): SigmoidExperts,
}
"""By family and layer."""


def second_pair(
    model_type: str, layer: str, config: tuple[tuple[str, AxisValue], ...] = (), wrong: Iterable[str] = ()
) -> Pair:
    """The pair for a configuration, with a second implementation for the candidate; the reference is shared."""
    return second_beside(pair_of(model_type, layer, config), wrong)


def second_beside(pair: Pair, wrong: Iterable[str] = ()) -> Pair:
    """A pair on the same references, with a second implementation for the candidate."""
    implementation, mistakes = SECOND[pair.family.model_type, pair.layer.name], frozenset(wrong)

    def build(config: Any) -> Part:
        return implementation(config, mistakes)

    return pair.beside(replace(pair.layer, candidate=build))
