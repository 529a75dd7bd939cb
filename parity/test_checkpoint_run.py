"""A checkpoint run holds a whole model with weights of its own, however they lie on disk, and says where it departs."""

import gc
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from parity import reference
from parity.checkpoint import SCENARIO, run_checkpoint
from parity.scenario import DTYPES, Scenario, parse_scenario
from parity.tiny.checkpoint import checkpoint
from parity.tiny.write import write
from reimpl.decoder import CausalLM
from reimpl.llama import LlamaForCausalLM

pytestmark = pytest.mark.parity
FIXTURES = Path(__file__).parents[1] / "fixtures"
LLAMA = FIXTURES / "llama"
EXACT = replace(SCENARIO, dtypes=("f64",))
LAYOUTS: dict[str, dict[str, Any]] = {
    "in shards": {"shard_bytes": 20_000},
    "with the rope keys of version 4": {"rope_keys": "v4"},
    "with the rope keys of version 5": {"rope_keys": "v5"},
    "in float32": {"dtype": torch.float32},
    "in float16": {"dtype": torch.float16},
}
ORIGINAL = {"original_max_position_embeddings": 16}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "a tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a single key/value head": {"num_key_value_heads": 1},
    "a padding token": {"pad_token_id": 0},
    "dynamic frequencies": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    "two sets of frequencies": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            **ORIGINAL,
        }
    },
}
FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a key": (lambda model: model.model.layers[1].self_attn.k_proj.weight[3].mul_(1.001), "model.layers.1.self_attn"),
    "a unit of the mlp": (lambda model: model.model.layers[0].mlp.up_proj.weight[3].mul_(1.001), "model.layers.0"),
    "the last norm": (lambda model: model.model.norm.weight[3].mul_(1.001), "model"),
    "the head": (lambda model: model.lm_head.weight[3].mul_(1.001), "output"),
}


def run(directory: Path, scenario: Scenario = EXACT, report: Path | None = None) -> tuple[int, str]:
    """The exit code, and what was printed."""
    printed = io.StringIO()
    code = run_checkpoint(directory, scenario, report, Console(file=printed, width=200, soft_wrap=True))
    return code, printed.getvalue()


def read_ours(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Let our side read checkpoints with a change."""
    original = LlamaForCausalLM.from_checkpoint.__func__  # type: ignore[attr-defined]  # of a class method

    def changed(cls: type, *args: Any) -> Any:
        model = original(cls, *args)
        with torch.no_grad():
            change(model)
        return model

    monkeypatch.setattr(LlamaForCausalLM, "from_checkpoint", classmethod(changed))


class TestHolds:
    @pytest.mark.parametrize("model_type", sorted(path.parent.name for path in FIXTURES.glob("*/config.json")))
    def test_a_tiny_checkpoint_of_every_family_in_every_dtype(self, model_type: str) -> None:
        code, printed = run(FIXTURES / model_type, replace(SCENARIO, dtypes=tuple(DTYPES)))
        assert code == 0, printed

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    def test_however_it_lies_on_disk(self, layout: dict[str, Any], tmp_path: Path) -> None:
        write(tmp_path, *checkpoint("llama"), **layout)
        assert run(tmp_path, SCENARIO)[0] == 0

    @pytest.mark.parametrize("changes", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
    def test_whatever_its_configuration(self, changes: dict[str, Any], tmp_path: Path) -> None:
        write(tmp_path, *checkpoint("llama", **changes))
        assert run(tmp_path, SCENARIO)[0] == 0

    @pytest.mark.parametrize("line", ["b1 s70,1 f64 #1", "b2 packed3,9 s12 f64 #2", "b1 s4,4 @1000 f64 #3"])
    def test_on_whatever_it_is_run(self, line: str) -> None:
        assert run(LLAMA, parse_scenario(line))[0] == 0

    def test_decodes_greedily_whatever_a_checkpoint_says_about_sampling(self, tmp_path: Path) -> None:
        write(tmp_path, *checkpoint("llama"))
        sampling = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 9.0, "eos_token_id": 1}
        (tmp_path / "generation_config.json").write_text(json.dumps(sampling))
        assert run(tmp_path)[0] == 0

    def test_reports_a_row_for_each_part_and_a_bar_for_each_verdict(self, tmp_path: Path) -> None:
        code, printed = run(LLAMA, SCENARIO, tmp_path / "report.json")
        report = json.loads((tmp_path / "report.json").read_text())
        parts = ("attention", "block", "model", "logits")
        named = [(row["layer"], row["property"]) for row in report["rows"]]
        wanted = [(part, f"forward {dtype}") for dtype in SCENARIO.dtypes for part in parts]
        assert sorted(named) == sorted([*wanted, ("logits", "generation")])
        bars = {bar["name"]: bar for bar in report["bars"]}
        assert len(bars) == len(report["bars"])
        assert {"llama/logits/forward f64/output", "llama/logits/forward bf16/cache"} <= bars.keys()
        assert code == 0
        assert all(bar["holds"] for bar in bars.values())
        assert "all 13 rows hold" in printed


class TestFinds:
    @pytest.mark.parametrize(("change", "where"), FAULTS.values(), ids=FAULTS)
    def test_where_a_weight_differs(
        self, change: Callable[[Any], object], where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read_ours(monkeypatch, change)
        code, printed = run(LLAMA)
        assert code == 1
        assert re.search(rf"where +first departs at {re.escape(where)}$", printed, re.MULTILINE), printed
        assert f"parity run --checkpoint {LLAMA} --scenario 'b2 s24,4,1,1,1 left0,5 masked f64 #0'" in printed

    def test_what_shows_in_low_precision_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def coarse(model: Any) -> None:
            norm = model.model.layers[1].input_layernorm
            norm.register_forward_hook(lambda module, args, output: output.bfloat16().to(output.dtype))

        read_ours(monkeypatch, coarse)
        code, printed = run(LLAMA, replace(SCENARIO, dtypes=("f32",)))
        assert code == 1
        assert "first departs at model.layers.1.self_attn" in printed

    def test_another_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            CausalLM, "generate", lambda self, ids, new_tokens, **_: ids.repeat(1, 2)[:, : 31 + new_tokens]
        )
        code, printed = run(LLAMA)
        assert code == 1
        assert re.search(r"llama logits +generation +FAILS", printed)
        assert "1 of 5 rows FAIL" in printed

    def test_a_candidate_that_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(model: Any) -> None:
            model.model.layers[1].mlp = nn.Linear(2, 3)

        read_ours(monkeypatch, broken)
        code, printed = run(LLAMA)
        assert code == 1
        assert "the candidate raises RuntimeError in torch.float64" in printed


def test_one_model_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def alive() -> list[str]:
        gc.collect()
        return [type(each).__module__ for each in gc.get_objects() if type(each).__name__ == LlamaForCausalLM.__name__]

    load, seen = reference.load, list[list[str]]()

    def watched(*args: Any) -> Any:
        seen.append(alive())
        return load(*args)

    monkeypatch.setattr(reference, "load", watched)
    read_ours(monkeypatch, lambda model: seen.append(alive()))
    before = alive()
    run(LLAMA, SCENARIO)
    ours = [*before, "reimpl.llama"]
    assert seen == [ours, before] * len(SCENARIO.dtypes)
