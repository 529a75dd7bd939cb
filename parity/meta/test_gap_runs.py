"""A run blames nobody for what differs in a known gap alone, and hides nothing else behind it."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parity import family as families
from parity import gaps, listing
from parity import property as properties
from parity.pair import pair_of
from parity.run import Reports, run_scenario, select
from parity.runner import Tally, hold
from reimpl import deepseek_v3, latent_attention

WINDOW_OF_ONE = "window=1 s4,1,1 f64 #3"


@pytest.fixture
def other_candidates() -> Iterator[None]:
    """Layers that are built now are not kept, and those kept are not used."""
    pair_of.cache_clear()
    yield
    pair_of.cache_clear()


def run(line: str, path: Path, model: str = "mistral", prop: str = "chunks") -> tuple[int, str, dict[str, Any]]:
    """Exit code, what is printed, and the one row of the report."""
    console = Console(file=StringIO(), width=200, soft_wrap=True)
    code = run_scenario(select(model, ["model"], [prop], []), line, Reports(path), console)
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return code, console.file.getvalue(), row  # type: ignore[attr-defined]


def test_a_scenario_in_a_gap_is_told_and_does_not_fail(tmp_path: Path) -> None:
    code, printed, row = run(WINDOW_OF_ONE, tmp_path / "report.json")
    assert code == 0
    assert row["result"] == "gap"
    assert [gap["name"] for gap in row["gaps"]] == ["window-of-one"]
    assert row["mismatch"] is None
    assert f"the reference is inconsistent here: {gaps.WINDOW_OF_ONE.sentence} (transformers>=4.57.6)" in printed
    assert "the row holds, 1 but for a known gap in the reference" in printed


def test_a_scenario_beside_it_simply_holds(tmp_path: Path) -> None:
    code, printed, row = run(WINDOW_OF_ONE.replace("=1", "=2"), tmp_path / "report.json")
    assert (code, row["result"], row["gaps"]) == (0, "holds", [])
    assert "gap" not in printed


def test_where_one_run_suffices_a_gap_between_two_is_none(tmp_path: Path) -> None:
    line = "rope=dynamic s3,1 @70 f64 #3"
    results = [run(line, tmp_path / "report.json", "llama", prop)[2]["result"] for prop in ("chunks", "forward")]
    assert results == ["gap", "holds"]


def held() -> Tally:
    """What a few scenarios show of DeepSeek-V3's decoder layer, most of them with an epsilon other than 1e-6."""
    family = families.load("deepseek_v3")
    return hold(properties.find("forward"), family, family.layer("block"), ("f64",), examples=20, seed=1)


def latents(eps: float | None) -> Tally:
    """The same with another epsilon in the norms of the latents; None: as it is configured."""
    build = deepseek_v3.DeepseekV3Attention.__init__

    def built(self: Any, config: Any, layer_idx: int = 0) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latent_attention, "LATENT_EPS", config.rms_norm_eps if eps is None else eps)
            build(self, config, layer_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepseek_v3.DeepseekV3Attention, "__init__", built)
        return held()


def test_our_layer_follows_the_reference_into_the_gap() -> None:
    tally = held()
    assert tally.mismatch is None
    assert not tally.gaps


@pytest.mark.usefixtures("other_candidates")
def test_a_candidate_that_goes_by_the_configuration_is_not_blamed() -> None:
    tally = latents(eps=None)
    assert tally.mismatch is None
    assert list(tally.gaps) == ["latent-eps"]
    assert tally.scenarios


@pytest.mark.usefixtures("other_candidates")
def test_a_candidate_that_is_wrong_outside_as_well_is_blamed_there() -> None:
    mismatch = latents(eps=1e-2).mismatch
    assert mismatch is not None
    assert not gaps.at(mismatch.place)
    assert "inconsistent" not in str(mismatch)


def test_the_list_has_every_gap_with_its_sentence() -> None:
    console = Console(file=StringIO(), width=1000)
    listing.print_gaps(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for gap in gaps.GAPS:
        assert gap.name in printed
        assert gap.sentence in printed
