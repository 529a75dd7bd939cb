"""The correction bias in training: it balances what is skewed, and steers the choice alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from parity.compare import Judgement, Quantity
from parity.function import Function, same
from parity.tiny import draw
from reimpl.balance import Balancer, load, violation
from reimpl.moe import GroupedRouter

SIZE, TOKENS, STEPS, LOTS, SPEED = 12, 32, 200, 50, 0.02


@dataclass(frozen=True)
class Stream:
    """Batches of tokens that have much in common, for experts in groups; some groups are kept, some experts chosen."""

    experts: int
    groups: int
    kept: int
    chosen: int
    skew: float = 1.0
    seed: int = 0

    def router(self) -> GroupedRouter:
        """A router whose experts differ."""
        router = GroupedRouter(SIZE, self.experts, self.chosen, self.groups, self.kept)
        router.weight.data = draw.normal((self.experts, SIZE), self.seed, "router") * SIZE**-0.5
        return router.train()

    def batches(self) -> torch.Tensor:
        """Every batch of the stream, [steps, tokens, size]."""
        common = draw.normal((SIZE,), self.seed, "common") * self.skew
        return draw.normal((STEPS, TOKENS, SIZE), self.seed, "tokens") + common


def judge(stream: Stream) -> list[Judgement]:
    """The update as the paper writes it, the loads that it leads to, and the weights."""
    router, batches = stream.router(), stream.batches()
    balancer = Balancer(router, SPEED)
    late, updates = torch.zeros(stream.experts, dtype=torch.long), []
    for step, batch in enumerate(batches):
        before = router.e_score_correction_bias.clone()
        chosen = router(batch).experts
        balancer.step()
        if step < 2:
            updates.append(same("update", router.e_score_correction_bias.tolist(), algorithm(before, chosen)))
        if 2 * step >= STEPS:
            late += load(chosen, stream.experts)
    reached = violation(late)
    allowed = _of_chance(stream)
    balanced = Judgement(Quantity("violation of balance", "routing"), "f32", reached, reached, allowed, allowed)
    return [*updates, balanced, *_weights(stream, router, batches[-1])]


def algorithm(bias: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    """Algorithm 1, expert by expert: up if it had less than the mean, down if it had more."""
    counts = [sum(row.count(expert) for row in chosen.tolist()) for expert in range(len(bias))]
    mean = sum(counts) / len(counts)
    after = bias.clone()
    for expert, count in enumerate(counts):
        if count != mean:
            after[expert] += SPEED if count < mean else -SPEED
    return after.tolist()


def _of_chance(stream: Stream) -> float:
    """How far from balance a batch is on average whose tokens choose their experts by lot, evenly."""
    lots = draw.normal((LOTS, TOKENS, stream.experts), stream.seed, "lots").topk(stream.chosen).indices
    return sum(violation(load(batch, stream.experts)) for batch in lots) / LOTS


def _weights(stream: Stream, router: GroupedRouter, batch: torch.Tensor) -> list[Judgement]:
    """The bias is out of the weights: they are those of the bare scores, and no gradient reaches it."""
    routing = router(batch)
    scores = torch.sigmoid(batch @ router.weight.T).gather(-1, routing.experts)
    bare = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    with torch.no_grad():
        router.e_score_correction_bias += 0.25  # to all alike, and to the bit
        shifted = router.eval()(batch)
    off = (routing.weights - bare).abs().max().item()
    exact = torch.finfo(torch.float32).eps
    return [
        Judgement(Quantity("weights", "output"), "f32", off, off, exact, exact),
        same("bias is trained", "e_score_correction_bias" in dict(router.named_parameters()), False, "gradient"),
        same("choice under one bias for all", shifted.experts.tolist(), routing.experts.tolist(), "routing"),
    ]


CHOICES = tuple(Stream(*sizes) for sizes in ((4, 1, 1, 2), (8, 1, 1, 1), (8, 4, 2, 3), (12, 3, 2, 5), (16, 4, 2, 4)))

FUNCTION = Function(
    "balance",
    "the bias that balances experts: its update, even loads on a skewed stream, and no part in the weights",
    "reimpl.balance.Balancer",
    "arXiv:2408.15664, algorithm 1; choices by lot",
    st.builds(
        lambda choice, skew, seed: replace(choice, skew=skew, seed=seed),
        st.sampled_from(CHOICES),
        st.sampled_from((1.0, 0.3, 2.0)),
        st.integers(0, 2**32 - 1),
    ),
    judge,
)
