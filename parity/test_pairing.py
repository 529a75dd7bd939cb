"""Adjacent rotary pairs on unpermuted weights are half pairs on permuted ones, in outputs and in cached keys."""

import pytest
from torch import Tensor

from parity.compare import Judgement
from parity.pair import pair_of
from parity.properties.pairing import compare, permuted
from parity.property import find
from parity.rows import Row
from parity.scenario import Scenario
from parity.tiny import initialise
from reimpl.rope import adjacent_from_half

pytestmark = pytest.mark.parity
PROPERTY = find("pairing")

HEADS = ("4/4", "4/1", "8/4", "6/3")


def test_the_other_pairing_is_the_same_with_permuted_rows(row: Row) -> None:
    row.holds()


@pytest.mark.parametrize("heads", HEADS)
def test_a_permutation_with_the_right_heads_holds(heads: str) -> None:
    assert all(judgement.holds for judgement in _judged(heads, 8, 8))


@pytest.mark.parametrize("heads", HEADS)
def test_a_permutation_with_the_wrong_heads_fails(heads: str) -> None:
    query, key_value = map(int, heads.split("/"))
    k_width = (
        8 * key_value // query if query != key_value else 4
    )  # as though k had as many heads as q, or twice as many
    failed = [str(judgement.quantity) for judgement in _judged(heads, 8, k_width) if not judgement.holds]
    assert "output" in failed


def _judged(heads: str, q_width: int, k_width: int) -> list[Judgement]:
    """Judge the adjacent pairing with rows permuted as though heads had these widths; right is 8."""
    scenario = Scenario(config=(("heads", heads), ("head_dim", 8)), schedule=(4, 1), dtypes=("f64",))
    pair = pair_of("llama", "attention", scenario.config)
    drawn = initialise.fill(pair.plan, scenario.seed)
    widths = {"q_proj": q_width, "k_proj": k_width}

    def permute(name: str) -> Tensor:
        width = widths.get(name.split(".")[-2])
        return drawn[name] if width is None else adjacent_from_half(drawn[name], width)

    assert permuted(pair, drawn, adjacent_from_half).keys() == drawn.keys()
    return compare(pair, scenario, reference=drawn, candidate={name: permute(name) for name in drawn})
