"""Near-ties are excused and counted, a wrong expert is caught, values are judged under the candidate's own choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity import routing
from parity.compare import Choice, Judgement, Record
from parity.pair import Pair, evaluate, forward, gradients, hold_against, run_candidate, run_references, run_truth
from parity.scenario import Scenario
from reimpl.moe import Routing

FAMILIES = ("mixtral", "deepseek_v3")

of_each_family = pytest.mark.parametrize("model_type", FAMILIES)
of_many_experts = pytest.mark.parametrize("experts", [64, 256])


def layer(model_type: str, experts: int) -> Pair:
    """A layer of experts of its own, since a fault is planted in it."""
    family = families.load(model_type)
    return Pair(family, family.layer("moe"), {"many": experts})


def scenario(seed: int, dtype: str = "bf16") -> Scenario:
    return Scenario(batch=3, schedule=(12,), stack=8, seed=seed, dtypes=(dtype,))


def failed(judgements: list[Judgement]) -> set[str]:
    return {judgement.quantity.verdict for judgement in judgements if not judgement.holds}


@contextmanager
def planted(pair: Pair, dtype: torch.dtype, where: str) -> Iterator[None]:
    """One token of a call goes to one wrong expert: seen in what the router compares, or put in after it chose."""
    gate = pair.candidate(dtype).module.gate

    def before(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].clone()
        x[17] = -x[17]
        return (x,)

    def after(module: torch.nn.Module, args: tuple[Tensor], chosen: Routing) -> Routing:
        experts = chosen.experts.clone()
        others = set(range(chosen.logits.shape[1])) - set(experts[17].tolist())
        experts[17, 0] = min(others)
        return chosen._replace(experts=experts)

    hook = gate.register_forward_pre_hook(before) if where == "before" else gate.register_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


@of_each_family
@of_many_experts
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("where", "verdict"), [("before", "routing"), ("after", "output")])
def test_one_wrong_expert_on_one_token_is_caught(
    model_type: str, experts: int, dtype: str, where: str, verdict: str
) -> None:
    pair = layer(model_type, experts)
    for seed in range(2):
        with planted(pair, {"bf16": torch.bfloat16, "f32": torch.float32}[dtype], where):
            assert verdict in failed(evaluate(pair, scenario(seed, dtype)))
        assert not failed(evaluate(pair, scenario(seed, dtype)))


def flips(pair: Pair) -> Iterator[tuple[Scenario, Record, Record]]:
    """Scenarios in which rounding makes the candidate choose otherwise than the truth, with both records."""
    for seed in range(40):
        case = pair.case(scenario(seed))
        truth, ours = (run_truth(pair, case, forward), run_candidate(pair, case, forward, torch.bfloat16))
        if not routing.obeyed(truth, routing.agreed(ours, truth)):
            yield case.scenario, truth, ours


def test_a_near_tie_is_excused_and_counted() -> None:
    pair = layer("mixtral", 256)
    found, truth, ours = next(flips(pair))
    judgements = hold_against(pair, pair.case(found), forward, truth, ours, "bf16")
    assert not failed(judgements)
    assert sum(judgement.near_ties for judgement in judgements) > 0
    assert sum(judgement.choices for judgement in judgements) == found.rows * found.length


def test_a_near_tie_would_be_a_mismatch_under_the_truth_s_choice() -> None:
    """The same numbers, judged as if nobody had looked at the routing."""
    pair = layer("mixtral", 256)
    found, truth, ours = next(flips(pair))
    unseen = Record(ours.quantities, ours.values, ours.valid)
    told = {kind: [choice.chosen] for kind, [choice] in routing._by_kind(truth).items()}
    references = run_references(pair, pair.case(found), forward, torch.bfloat16, told)
    assert "output" in failed(routing.judge(pair.case(found), truth, unseen, references, torch.bfloat16, "bf16"))


@of_each_family
def test_gradients_are_those_of_the_candidate_s_choice(model_type: str) -> None:
    """Told to choose what the candidate chose, the reference has other gradients, and the candidate's are right."""
    pair, told_otherwise = layer(model_type, 64), 0
    for seed in range(4):
        case = pair.case(scenario(seed))
        natural = run_truth(pair, case, gradients)
        told = {
            kind: [choice.scores.topk(kind[1] + 1, dim=1).indices[:, 1:] for choice in choices]
            for kind, choices in routing._by_kind(natural).items()
        }
        moved = run_truth(pair, case, gradients, told)
        assert routing.obeyed(moved, told)
        told_otherwise += not torch.equal(natural.values[0], moved.values[0])
    assert told_otherwise == 4


def test_another_number_of_experts_is_said() -> None:
    pair = layer("mixtral", 64)
    pair.candidate(torch.float32).module.gate.chosen += 1
    wrong = [j for j in evaluate(pair, scenario(0, "f32")) if not j.holds and j.quantity.verdict == "routing"]
    assert [(str(j.quantity), j.error) for j in wrong] == [("number chosen out of 64", 1)]


def test_choices_of_chunks_are_joined_token_by_token() -> None:
    rows, sizes = 2, (3, 1)
    steps = [torch.arange(rows * size * 5).view(rows * size, 5).float() + 100 * size for size in sizes]
    record = Record([], [], [], [Choice(scores, scores[:, :2].long()) for scores in steps])
    [whole] = routing.joined(record, rows, len(sizes))
    wanted = torch.cat([steps[0].view(rows, 3, 5), steps[1].view(rows, 1, 5)], dim=1).flatten(0, 1)
    assert torch.equal(whole.scores, wanted)
    assert torch.equal(whole.chosen, wanted[:, :2].long())


def test_watching_leaves_torch_as_it_was() -> None:
    before = torch.topk, Tensor.topk
    with pytest.raises(ZeroDivisionError), routing.watch({}):
        1 / 0  # noqa: B018 (to see that an error restores it, too)
    assert (torch.topk, Tensor.topk) == before
    assert "topk" not in vars(Tensor)


@pytest.mark.parametrize("call", [lambda x: torch.topk(x, 2), lambda x: x.topk(k=2, dim=-1, sorted=False)])
def test_a_choice_is_told_however_it_is_called(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    scores, told = torch.tensor([[1.0, 2, 3, 4], [9, 8, 7, 6]]), torch.tensor([[0, 1], [3, 0]])
    with routing.watch({(4, 2): [told]}) as choices:
        values, indices = call(scores)
    assert torch.equal(indices, told)
    assert torch.equal(values, torch.tensor([[1.0, 2], [6, 9]]))
    assert len(choices) == 1


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (2, 2)])
def test_what_is_no_choice_per_token_is_left_alone(shape: tuple[int, ...]) -> None:
    with routing.watch({(shape[-1], 2): []}) as choices:
        torch.rand(shape).topk(2)
    assert not choices
