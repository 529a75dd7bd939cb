"""The cause of a mismatch is named for any model type, by mistakes made in the reference itself, and never wrongly."""

from functools import partial

import pytest
from torch import nn

from parity.check import cause
from parity.check.cause import cause_of
from parity.check.session import Options, Session, Site
from parity.meta.strayed import (
    adjacent,
    attending,
    by_length,
    from_zero_again,
    halves,
    one_further,
    placed,
    rotated,
    strayed,
    tiled,
    up_to,
)

TILES = "tiles key/value heads where the reference repeats each"
ADJACENT = "rotates adjacent pairs where the reference rotates halves"
HALVES = "rotates halves where the reference rotates adjacent pairs"
NEXT, ALL = "lets tokens see the one after them", "lets tokens see those after them"
ROOT = "scales by the root of head_dim, whatever the configuration says"

WRONG = {
    ("gemma:GemmaAttention", TILES): partial(strayed, change=tiled),
    ("olmo:OlmoForCausalLM", TILES): partial(strayed, change=tiled),
    ("olmo2:Olmo2Attention", ADJACENT): partial(strayed, change=rotated(adjacent)),
    ("cohere:CohereAttention", HALVES): partial(strayed, change=rotated(halves)),
    ("gemma:GemmaAttention", "rotates the wrong way"): partial(strayed, change=rotated(halves, sign=-1.0)),
    ("phi3:Phi3Attention", "leaves q unrotated"): partial(strayed, change=rotated(halves, queries=False)),
    ("phi3:Phi3Attention", "does not scale the scores"): partial(strayed, change=attending(lambda scale, q: 1.0)),
    ("gemma2:Gemma2Attention", ROOT): partial(strayed, change=attending(lambda scale, q: q.shape[-1] ** -0.5)),
    ("phi3:Phi3Attention", NEXT): partial(strayed, change=attending(see=up_to(1))),
    ("phi3:Phi3Attention", ALL): partial(strayed, change=attending(see=up_to(99))),
    ("gemma2:Gemma2Attention", "ignores the window"): partial(strayed, change=attending(see=up_to(0))),
    ("olmo2:Olmo2Attention", "counts positions from 1"): partial(placed, tables=one_further),
    ("olmo2:Olmo2Attention", "decodes from position 0 again"): partial(placed, tables=from_zero_again),
    ("olmo2:Olmo2Attention", "ignores the positions given"): partial(placed, tables=by_length),
}
each_wrong = pytest.mark.parametrize(("reference", "name"), WRONG)


def sites(candidate: type[nn.Module], reference: str) -> list[Site]:
    return Session(Options(candidate, reference, configurations=1, draws=0)).sites


@each_wrong
def test_the_mistake_is_named_alone_and_nothing_is_in_its_absence(reference, name, monkeypatch):
    there = sites(WRONG[reference, name](reference), reference)
    assert cause_of(there).names == (name,)
    monkeypatch.setattr(cause, "SLIPS", [slip for slip in cause.SLIPS if slip.name != name])
    assert cause_of(there).names == ()


@pytest.mark.parametrize("change", [attending(), rotated(adjacent)], ids=["attention", "rotation"])
def test_the_same_without_a_mistake_is_right(change):
    found = cause_of(sites(strayed("cohere:CohereAttention", change), "cohere:CohereAttention"))
    assert found == cause.Cause()


def test_a_model_type_of_ours_has_the_whole_catalogue_besides():
    there = sites(strayed("llama:LlamaAttention", tiled), "llama:LlamaAttention")
    found = cause_of(there)
    assert found.names == (TILES,)
    assert found.tried > len(cause.SLIPS) + 10
