"""Any class of the installed transformers can be held against: found, shrunk, recorded and replayed to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parity.check import drive, references, replay, tree
from parity.check.resolve import resolve
from parity.check.subject import Built, SubjectError
from parity.compare import judge
from parity.tiny import models, shrink, vary
from parity.tiny.models import PLAIN

DIVERSE = (
    ("causal", "falcon"),
    ("causal", "gemma3_text"),
    ("causal", "gpt_neox"),
    ("causal", "mamba"),
    ("causal", "olmo2"),
    ("causal", "phi3"),
    ("causal", "qwen3_moe"),
    ("masked", "roberta"),
    ("seq2seq", "t5"),
)
"""Attention of several kinds, a state space, experts, an encoder, and both halves of one."""

each_kind = pytest.mark.parametrize(("task", "model_type"), DIVERSE)


@pytest.fixture(scope="module")
def attention() -> Built:
    return resolve("llama:LlamaAttention").build()


@each_kind
def test_every_call_of_every_module_replays_to_the_bit(task: str, model_type: str) -> None:
    found = references.look(model_type, task, drive.names(task))
    assert not found.reason
    assert found.inexact == ()
    assert found.replayed == found.exact > 20
    assert found.scenarios == tuple((name, None) for name in drive.names(task))


@each_kind
def test_every_layer_kind_of_the_original_is_in_the_tiny_model(task: str, model_type: str) -> None:
    kinds = getattr(shrink.default(model_type), "layer_types", None)
    assert kinds is None or set(kinds) == set(models.config(model_type, task).layer_types)


def test_a_wrong_replay_is_seen(attention: Built) -> None:
    module: Any = attention.module(torch.float32)
    with torch.no_grad():
        module.o_proj.weight[0, 0] += 1e-3
    call = attention.recorded("decode", torch.float32)[1]
    assert replay.equal(call, replay.exactly(module, call)) == ["output[0]"]


def test_a_wrong_cache_is_seen(attention: Built) -> None:
    module: Any = attention.module(torch.float32)
    with torch.no_grad():
        module.v_proj.weight[0, 0] += 1e-3
    call = attention.recorded("decode", torch.float32)[1]
    assert "layer 0 values" in replay.equal(call, replay.exactly(module, call))


@pytest.mark.parametrize("measure", ["forward", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scenario", ["prefill", "padded"])
def test_the_reference_holds_against_itself(attention: Built, scenario: str, dtype: torch.dtype, measure: str) -> None:
    call = attention.calls(scenario)[-1]
    yardsticks = [] if dtype is torch.float64 else attention.yardsticks(call, dtype, measure)
    ours = attention.measured(attention.module(dtype), call, dtype, measure)
    judgements = judge(attention.truth(call, measure), ours, yardsticks, dtype, str(dtype))
    assert judgements
    assert all(judgement.holds for judgement in judgements)


@pytest.mark.parametrize("measure", ["forward", "gradients"])
def test_a_wrong_scale_does_not_hold(attention: Built, measure: str) -> None:
    call = attention.calls("prefill")[0]
    module: Any = attention.module(torch.float64)
    module.scaling *= 1 + 1e-9
    judgements = judge(
        attention.truth(call, measure), attention.measured(module, call, torch.float64, measure), [], torch.float64, ""
    )
    assert not all(judgement.holds for judgement in judgements)


def test_what_padded_rows_hold_is_not_compared(attention: Built) -> None:
    prefill, decode = attention.calls("padded")[:2]
    first = attention.truth(prefill)
    valid = dict(zip(map(str, first.quantities), first.valid, strict=True))
    assert valid["output[0]"] is not None
    assert valid["output[0]"][0, :3].any().item() is False
    assert valid["layer 0 keys"] is not None
    assert valid["layer 0 keys"].shape == (3, 1, 9, 1)
    assert decode.valid is None


def test_what_is_recorded_does_not_change_later(attention: Built) -> None:
    call = attention.calls("decode")[1]
    before = {path: tensor.clone() for path, tensor in tree.tensors(call.given).items()}
    replay.forward(attention.module(torch.float32), call, torch.float32)
    assert all(torch.equal(tensor, before[path]) for path, tensor in tree.tensors(call.given).items())


def test_what_is_written_to_is_said(attention: Built) -> None:
    def writes(hidden_states: torch.Tensor, **rest: object) -> torch.Tensor:
        return hidden_states.mul_(2)

    call = attention.calls("prefill")[0]
    assert replay.run(writes, *replay.arguments(call, torch.float32)).written == ["hidden_states"]


def test_the_constructor_builds_the_class_again(attention: Built) -> None:
    args, kwargs = attention.constructor
    module = type(attention.module(torch.float32))(*args, **kwargs)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        name: tuple(value.shape) for name, value in attention.state.items()
    }


def test_names_on_disk_are_those_of_a_checkpoint() -> None:
    built = resolve("MixtralSparseMoeBlock").build()
    assert {"gate.weight", "experts.0.w1.weight", "experts.4.w3.weight"} <= built.disk.keys()
    fused = built.state["experts.gate_up_proj"]
    assert torch.equal(fused[0], torch.cat([built.disk["experts.0.w1.weight"], built.disk["experts.0.w3.weight"]]))


def test_weights_show_mistakes(attention: Built) -> None:
    norm = resolve("llama:LlamaRMSNorm").build().state["weight"]
    unit_offset = resolve("gemma:GemmaRMSNorm").build().state["weight"]
    assert norm.std() > 0.3
    assert abs(norm.mean() - 1) < 0.3
    assert unit_offset.std() > 0.3
    assert abs(unit_offset.mean()) < 0.3
    assert attention.state["q_proj.weight"].std() * 48**0.5 == pytest.approx(1.6, rel=0.1)


def test_variations_are_drawn_by_seed_and_run() -> None:
    points = vary.points("llama", "causal", 4)
    assert points[0] == PLAIN
    assert len(set(points)) == len(points) == 4
    assert points == vary.points("llama", "causal", 4)
    assert points != vary.points("llama", "causal", 4, seed=1)
    assert all(resolve("llama:LlamaAttention").build(point).calls("prefill") for point in points)


def test_points_go_round_the_layers_of_a_model() -> None:
    subject = resolve("gemma3_text:Gemma3Attention")
    sites = [subject.build(models.Point(place=place)) for place in range(3)]
    assert [site.layer_idx for site in sites] == [0, 1, 0]
    assert [site.model.get_submodule(site.path).is_sliding for site in sites] == [True, False, True]


def test_a_checkpoint_is_its_own_reference(request: pytest.FixtureRequest) -> None:
    built = resolve(str(request.config.rootpath / "fixtures" / "llama")).build()
    assert built.path == ""
    assert built.state["lm_head.weight"].shape == (61, 36)
    assert built.calls("decode")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lama:LlamaAttention", "llama"),
        ("llama:LlamaAtention", "LlamaAttention"),
        ("LlamaAtention", "LlamaAttention"),
        ("no_such_thing", "model_type:Class"),
        ("vit", "no language-model head"),
    ],
)
def test_an_unknown_reference_is_refused_with_what_is_near(text: str, said: str) -> None:
    with pytest.raises(SubjectError, match=said):
        resolve(text)


def test_a_class_that_the_tiny_model_lacks_is_refused() -> None:
    with pytest.raises(SubjectError, match="has no T5DenseActDense; it has"):
        resolve("t5:T5DenseActDense").build(models.Point((("is_gated_act", True), ("dense_act_fn", "gelu_new"))))


def test_what_cannot_be_shrunk_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**fields: object) -> None:
        raise ValueError("wants a licence")

    plain = shrink.default("olmo")
    monkeypatch.setattr(type(plain), "__init__", lambda self, **fields: refuses(**fields))
    monkeypatch.setattr(shrink, "default", lambda model_type: plain)
    with pytest.raises(
        shrink.Unshrinkable, match="olmo: no tiny configuration is accepted: ValueError: wants a licence"
    ):
        list(shrink.candidates("olmo"))


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SubjectError, match=r"config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(SubjectError, match="did you mean 'llama'"):
        resolve(str(tmp_path))


def test_most_model_types_are_known() -> None:
    if transformers.__version__ == "5.24.0":
        assert {task: len(models.model_types(task)) for task in models.TASKS} == {
            "seq2seq": 38,
            "masked": 51,
            "causal": 196,
        }
