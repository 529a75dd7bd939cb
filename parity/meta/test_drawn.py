"""Scenarios of a check are drawn by seed, written as lines that are read back, and made smaller."""

import pytest

from parity.check import drawn, drive
from parity.check.resolve import resolve
from parity.check.session import Options, Session
from parity.check.subject import Built, SubjectError
from parity.meta import stranger
from parity.scenario import ScenarioError


@pytest.fixture(scope="module")
def attention() -> Built:
    return resolve("olmo2:Olmo2Attention").build()


@pytest.mark.parametrize("task", ["causal", "masked", "seq2seq"])
def test_a_seed_draws_the_same_lines_and_another_seed_others(task):
    lines = drawn.drawn(task, 20, 3)
    assert lines == drawn.drawn(task, 20, 3) != drawn.drawn(task, 20, 4)
    assert all(drawn.line_of(drawn.text(line)) == line for line in lines)


def test_draws_go_through_everything_that_a_line_can_say():
    texts = [drawn.text(line) for line in drawn.drawn("causal", 100, 0)]
    assert {len(text.steps) for text in texts} >= {1, 2, 3, 4}
    assert {text.scale for text in texts} == set(drawn.SCALES)
    assert {text.offset for text in texts} == {0, *drawn.OFFSETS}
    assert {text.side for text in texts if any(text.padding)} == {"left", "right"}
    assert {text.rows for text in texts} == {1, 2, 3}


def test_each_of_the_drawn_ones_runs(attention):
    lines = drawn.drawn("causal", 12, 0)
    assert all(attention.refusal(line) is None for line in lines)
    assert all(attention.calls(line) for line in lines)


def test_the_scale_is_that_of_what_the_class_is_given(attention):
    plain, small = (attention.calls(f"b1 s3,1{scale} #5") for scale in ("", " x0.001"))
    ratio = small[0].kwargs["hidden_states"] / plain[0].kwargs["hidden_states"]
    assert ratio.allclose(ratio.new_tensor(1e-3), rtol=1e-2)
    assert small[0].kwargs["position_embeddings"][0].equal(plain[0].kwargs["position_embeddings"][0])


def test_the_first_position_is_that_of_the_line(attention):
    near, far = (attention.calls(f"b1 s4{offset} #0")[0].kwargs["position_embeddings"][0] for offset in ("", " @2"))
    assert near[:, 2:].equal(far[:, :2])


@pytest.mark.parametrize(("text", "line"), [("decode", "b2 s9,1,1 #0"), ("padded", "b3 s9,1,1 left3,0,1 masked #0")])
def test_named_ones_can_be_said_as_lines(text, line):
    assert drawn.line_of(drive.TEXTS[text]) == line


@pytest.mark.parametrize("line", ["h6/3 b1 s2", "b1 s2 packed1,1", "b1 s3 inner1", "b1 s2 m5", "decod", "s2 b1 b2"])
def test_lines_that_say_nothing_here_are_refused(line):
    with pytest.raises(ScenarioError):
        drawn.text(line)
    with pytest.raises(SubjectError, match="there are prefill, decode"):
        Session(Options(stranger.Right, "llama:LlamaAttention", scenario=line))


def test_what_fails_is_made_as_small_as_it_can_be():
    def fails(line: str) -> bool:
        text = drawn.text(line)
        return sum(text.steps) > 4 and text.rows > 1

    assert drawn.smallest("b3 s5,1,3 left0,2,1 masked @0 x0.001 #77", fails) == "b2 s5 #0"
