"""`parity check` says of a stranger's layer what is true of it, whatever the layer does."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parity.check import card, command, new
from parity.check.candidate import CandidateError
from parity.check.result import SENTENCES, Result
from parity.check.sandbox import Limits
from parity.check.session import Options, check
from parity.errors import InputError
from reimpl.weights import WeightError

HERE = Path(__file__).parent
LLAMA = "llama:LlamaAttention"
LIMITS = Limits(seconds=2, memory=2**31)


def options(name: str, **settings: Any) -> Options:
    given = Options(
        f"{HERE / 'stranger.py'}:{name}", LLAMA, configurations=1, draws=0, dtypes=("f64", "bf16"), limits=LIMITS
    )
    return replace(given, **settings)


def said(result: Result) -> str:
    return " ".join(text for mismatch in result.mismatches for _, text in mismatch["lines"])


def test_a_right_layer_holds_in_all_dtypes_and_configurations():
    result = check(options("Right", configurations=2, dtypes=("f64", "f32", "bf16", "f16")))
    assert result.holds, result
    assert {row["result"] for row in result.rows} == {"holds"}
    assert len(result.configurations) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Tiled", "times the allowance"),
        ("Coarse", "softmax is computed in a coarser dtype"),
        ("Writes", "writes to hidden_states"),
        ("NotANumber", "is not finite"),
        ("Nonsense", "returns a str"),
        ("Raises", "ArithmeticError: no such rope"),
        ("Greedy", "can't allocate memory"),
        ("Exits", "SystemExit"),
        ("Hangs", "does not return within"),
        ("Returns", "returns its input"),
        ("Wavers", "another result each time"),
        ("Sparse", "a tensor that is sparse_coo"),
        ("Interrupts", "raises KeyboardInterrupt"),
    ],
)
def test_a_wrong_layer_is_told_what_is_wrong(name, words):
    result = check(options(name, scenario="prefill"))
    assert not result.holds
    assert words in said(result)


def test_a_layer_that_ends_the_process_ends_in_a_verdict():
    result = command.checked(options("Leaves"))
    assert not result.holds
    assert "ends the process itself" in said(result)


def test_a_layer_that_cannot_be_copied_is_built_again():
    assert check(options("Uncopied", scenario="prefill", dtypes=("f64",))).holds


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processes are looked up in /proc")
def test_what_a_layer_starts_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_TEST_COPIES", str(tmp_path / "pid"))
    assert command.checked(options("Copies", scenario="prefill", dtypes=("f64",), properties=("forward",))).holds
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    for _ in range(50):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("a copy of the process is still there")


@pytest.mark.parametrize(("name", "why"), [("Calls", "LlamaAttention.forward"), ("Borrows", "--shared apply_rotary")])
def test_a_layer_that_runs_the_reference_proves_nothing(name, why):
    result = check(options(name, scenario="prefill", dtypes=("f64",)))
    assert why in (result.refused or "")
    assert not result.holds


def test_what_is_declared_as_shared_is_said():
    result = check(
        options("Borrows", scenario="prefill", dtypes=("f64",), shared=("apply_rotary_pos_emb", "rotate_half"))
    )
    assert result.holds
    assert any("taken as right" in note for note in result.notes)


def test_a_layer_with_its_own_signature_names_and_cache_holds():
    given = options("OwnSignature", adapter=f"{HERE / 'stranger_adapter.py'}:Adapt", dtypes=("f64",))
    result = check(given)
    assert result.holds, said(result)
    assert result.weights == [
        "o_proj.weight -> out.weight",
        "q_proj.weight, k_proj.weight, v_proj.weight -> wqkv.weight: joined along axis 0",
    ]


def test_inferred_rules_can_be_written_and_read_back(tmp_path):
    rules = tmp_path / "rules.toml"
    given = options(
        "OwnSignature", adapter=f"{HERE / 'stranger_adapter.py'}:Adapt", dtypes=("f64",), scenario="prefill"
    )
    rules.write_text(check(given).rules)
    again = check(
        options("OwnSignature", adapter=given.adapter, weights=str(rules), dtypes=("f64",), scenario="prefill")
    )
    assert again.holds


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nofile.py:X", "no such file"),
        ("no.module:X", "no such module"),
        (f"{HERE / 'stranger.py'}:Rihgt", "did you mean 'Right'"),
        (f"{HERE / 'stranger.py'}:OnMeta", "meta device"),
        (f"{HERE / 'stranger.py'}:Unbuildable", "ArithmeticError: no such size (parity/meta/stranger.py, line"),
        (f"{HERE / 'stranger.py'}:OwnSignature", "class AdaptOwnSignature(parity.Adapter)"),
        (f"{HERE / 'stranger.py'}:LLAMA", "has no 'LLAMA'"),
        (f"{HERE / 'stranger.py'}", "say which of"),
        (f"{HERE / 'stranger.py'}:Lazy", "is made by the first call only"),
        (f"{HERE / '__init__.py'}", "defines no module"),
    ],
)
def test_what_cannot_be_found_or_built_is_said(place, words):
    with pytest.raises(CandidateError, match="candidate") as raised:
        check(Options(place, LLAMA, configurations=1, dtypes=("f64",)))
    assert words in str(raised.value)


def test_an_unknown_reference_is_bad_input():
    with pytest.raises(InputError, match="LlamaAttention"):
        command.checked(Options(f"{HERE / 'stranger.py'}:Right", "llama:LlamaAtention"))


def test_the_report_is_json_with_bars(tmp_path):
    file = tmp_path / "report.json"
    given = options("Tiled", scenario="prefill", dtypes=("f64",))
    assert command.command(given, command.Files(json=file), Console(quiet=True)) == 1
    report = json.loads(file.read_text())
    assert not report["holds"]
    assert any(not bar["holds"] for bar in report["bars"])
    assert all(bar.keys() == {"name", "value", "unit", "bar", "holds"} for bar in report["bars"])


@pytest.mark.parametrize(("name", "adapter"), [("Right", None), ("OwnSignature", "stranger_adapter.py:Adapt")])
def test_a_right_layer_takes_the_place_of_the_class_in_a_live_model(name, adapter):
    place = None if adapter is None else f"{HERE / adapter}"
    result = check(options(name, adapter=place, dtypes=("f64",), scenario="prefill", swap=True))
    assert result.holds, said(result)
    assert [row["property"] for row in result.rows][2:] == [name for name in SENTENCES if name.startswith("swap")]


def test_a_wrong_layer_leads_a_live_model_astray():
    result = check(options("Tiled", dtypes=("f64",), scenario="prefill", swap=True))
    assert {row["property"]: row["result"] for row in result.rows}["swap logits"] == "fails"


@pytest.mark.parametrize("reference", ["llama:LlamaAttention", "mixtral:MixtralSparseMoeBlock", "gpt2:GPT2Block"])
def test_ours_is_called_in_its_own_way(reference):
    model_type, _, name = reference.partition(":")
    given = Options(f"reimpl.{model_type}:{name}", reference, configurations=1, dtypes=("f64",), scenario="decode")
    result = check(given)
    assert all(row["result"] != "fails" for row in result.rows), said(result)


def test_where_a_layer_parts_from_the_reference_is_said():
    result = check(options("Tiled", scenario="prefill", dtypes=("f64",)))
    assert "first departs at scores, with v, q after rotation and k after rotation exact" in said(result)


def test_weights_that_lie_in_another_order_are_told_how_to_be_mended():
    result = check(options("Adjacent", scenario=None, properties=("forward",), dtypes=("f64",)))
    assert "rotates adjacent pairs where the reference rotates halves" in said(result)
    assert "adjacent_from_half(w, 16)" in said(result)


def test_mistakes_made_from_outside_are_caught_unless_the_layer_never_reads_what_is_wrong():
    result = check(options("Right", dtypes=("f64",), properties=("forward",), mistakes=True))
    names = {mistake["name"]: mistake["caught"] for mistake in result.mistakes}
    assert names["the mask hides nothing"]
    assert names["the cache is not read"]
    assert names["k_proj.weight has its rows in another order"]
    assert not any("rms_norm_eps" in name for name in names)
    assert all(names.values()), names


def test_a_mistake_that_no_scenario_reaches_is_not_caught():
    result = check(options("Right", dtypes=("f64",), properties=("forward",), mistakes=True, scenario="prefill"))
    assert not {mistake["name"] for mistake in result.mistakes} & {"the cache is not read"}


def test_the_card_says_what_was_held_against_what(tmp_path):
    report, file = tmp_path / "report.json", tmp_path / "card.md"
    given = options("Tiled", scenario="prefill", dtypes=("f64",), properties=("forward",))
    command.command(given, command.Files(json=report, card=file), Console(quiet=True))
    assert card.card(card.read(report)) == file.read_text()
    assert "FAILS" in file.read_text().splitlines()[0]
    report.write_text("{}")
    with pytest.raises(InputError, match="is no report"):
        card.read(report)


def test_a_test_file_is_written_for_a_layer(tmp_path):
    file = new.new(f"{HERE / 'stranger.py'}:Right", LLAMA, tmp_path / "test_right.py")
    assert f'parity.against("{LLAMA}").check("{HERE / "stranger.py"}:Right")' in file.read_text()
    with pytest.raises(InputError, match="is there already"):
        new.new(f"{HERE / 'stranger.py'}:Right", LLAMA, file)
    assert new.guess("MyFastQwen3Attention") == "qwen3:Qwen3Attention"


def moe(name: str) -> Options:
    return replace(options(name, properties=("forward",), scenario="prefill"), against="mixtral:MixtralSparseMoeBlock")


def test_experts_in_modules_of_their_own_hold_and_their_choices_are_judged():
    result = check(moe("Experts"))
    assert result.holds, said(result)
    assert all("routing" in row["worst"] for row in result.rows)
    assert any("above" in rule and "unstacked" in rule for rule in result.weights)


def test_a_wrong_choice_of_experts_is_caught_though_their_values_are_right():
    result = check(moe("WorstExperts"))
    failed = {j["verdict"] for row in result.rows for failure in row["failures"] for j in failure["judgements"]}
    assert "routing" in failed


def test_experts_that_no_token_goes_to_are_not_taken_for_unread_weights():
    result = check(replace(moe("Experts"), scenario="single", dtypes=("f64",)))
    assert result.holds, result.refused


def test_an_adapter_may_keep_the_cache_to_itself():
    place = f"{HERE / 'stranger_adapter.py'}:Remembers"
    result = check(options("OwnSignature", adapter=place, dtypes=("f64",), mistakes=True))
    assert result.holds, said(result)


def test_an_adapter_that_breaks_off_in_a_later_step_ends_in_a_verdict():
    result = check(options("OwnSignature", adapter=f"{HERE / 'stranger_adapter.py'}:Forgets", dtypes=("f64",)))
    assert "RuntimeError: no room" in said(result)
    assert "--scenario 'b1 s1,1 #0'" in said(result)


def test_a_failure_of_our_own_is_one_paragraph(monkeypatch):
    def broken(options: Options, send: Any) -> Result:
        send("at", "prefill")
        raise KeyError("lost")

    monkeypatch.setattr(command.session, "check", broken)
    with pytest.raises(
        InputError, match=r"prefill: parity itself fails: KeyError.*please report it with this line: parity"
    ):
        command.checked(options("Right"))


def rules(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "rules.toml"
    file.write_text("\n".join(lines))
    return str(file)


def test_rules_may_name_tensors_as_they_are_on_disk_and_gradients_follow(tmp_path):
    experts = [
        f'[[same]]\nfrom = "experts.*.{name}.weight"\nto = "experts.*.{name}.weight"' for name in ("w1", "w2", "w3")
    ]
    table = rules(tmp_path, '[[same]]\nfrom = "gate.weight"\nto = "router.weight"', *experts)
    result = check(replace(moe("Experts"), properties=("gradients",), weights=table))
    assert result.holds, said(result)
    assert "experts.4.w3.weight -> experts.4.w3.weight" in result.weights


def test_gradients_go_back_through_a_function_that_makes_the_state_dict():
    adapter, table = f"{HERE / 'stranger_adapter.py'}:Adapt", f"{HERE / 'stranger.py'}:as_state_dict"
    given = options("OwnSignature", adapter=adapter, weights=table, properties=("gradients",), scenario="prefill")
    result = check(given)
    assert result.holds, said(result)
    assert result.weights == ["all tensors by as_state_dict"]


@pytest.mark.parametrize(
    ("value", "holds"),
    [("value = 1.0", True), ("value = 0.5", False), (f'from = "{HERE}/stranger.py:open_gate"', True)],
)
def test_what_a_layer_has_of_its_own_is_said_in_a_rule(value, holds, tmp_path):
    table = rules(tmp_path, "[[own]]", 'to = "gate"', value, 'reason = "it is open"')
    result = check(options("Gated", weights=table, dtypes=("f64",), scenario="prefill"))
    assert result.holds is holds, said(result)
    assert any(line.startswith("gate is the candidate's own") for line in result.weights)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], r"of the candidate gate \[48\]; say .*\[\[own\]\]"),
        (["[[own]]", 'to = "gat"', "value = 1", 'reason = "open"'], "no such tensor; it has gate"),
        (["[[own]]", 'to = "gate"', 'value = "ones"', 'reason = "open"'], "should be a number"),
        (["[[own]]", 'to = "gate"', 'reason = "open"'], "lacks 'from' or 'value'"),
        (["[[own]]", 'to = "gate"', "value = 1"], "lacks 'reason'"),
        (["[[same]]", "from = 3", 'to = "gate"'], "from should be a name"),
    ],
)
def test_what_a_layer_has_of_its_own_is_not_passed_over(lines, words, tmp_path):
    with pytest.raises(WeightError, match=words):
        check(options("Gated", weights=rules(tmp_path, *lines)))


def test_a_failure_is_made_smaller_and_its_line_runs_it_again():
    result = check(options("Tiled", dtypes=("f64",), properties=("forward",)))
    shown = dict(result.mismatches[0]["lines"])
    assert shown["smallest"].startswith("b1 s1 #0, configuration 0")
    assert "--scenario 'b1 s1 #0'" in shown["again"]
    assert not check(options("Tiled", dtypes=("f64",), properties=("forward",), scenario="b1 s1 #0")).holds
