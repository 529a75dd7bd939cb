"""Balancing experts without a loss: a bias that steers the choice alone (Wang et al. 2024, arXiv:2408.15664, alg. 1).

After each step of training the bias of every expert moves by `speed` towards what balances:

    b_e <- b_e + speed sign(mean load - load_e)

No gradient is involved, and the weights of the chosen know nothing of the bias (DeepSeek-V3, 2412.19437, section
2.1.2; there `speed` is 0.001, and 0 for the last 500 billion of 14.8 trillion tokens).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from reimpl.moe import GroupedRouter, Routing

SPEED = 1e-3


def load(experts: Int[Tensor, "tokens chosen"], all_experts: int) -> Int[Tensor, " all_experts"]:
    """How many choices fell on each expert."""
    return experts.flatten().bincount(minlength=all_experts)


def moved(
    bias: Float[Tensor, " all_experts"], load: Int[Tensor, " all_experts"], speed: float = SPEED
) -> Float[Tensor, " all_experts"]:
    """The bias after a step in which the experts had this load: more for those below the mean, less for those above."""
    wide = load.double()
    return bias + speed * (wide.mean() - wide).sign().to(bias.dtype)


def violation(load: Int[Tensor, " all_experts"]) -> float:
    """MaxVio: by how much the largest load exceeds the mean, in units of it; 0 is balance (2408.15664, eq. 4)."""
    wide = load.double()
    return ((wide.max() - wide.mean()) / wide.mean()).item()


class Balancer:
    """Counts the load of every router of a model while it trains, and moves the biases when told to.

    Like an optimiser: any number of forwards, as for accumulated gradients, then one `step`.
    """

    def __init__(self, model: nn.Module, speed: float = SPEED) -> None:
        self.speed = speed
        self.loads = {
            part: torch.zeros_like(part.e_score_correction_bias, dtype=torch.long)
            for part in model.modules()
            if isinstance(part, GroupedRouter)
        }
        if not self.loads:
            raise ValueError(f"{type(model).__name__} has no router with a bias: there is nothing to balance")
        self._hooks = [router.register_forward_hook(self._count) for router in self.loads]

    def _count(self, router: nn.Module, args: tuple[Tensor], routing: Routing) -> None:
        if router.training:
            counted = self.loads[router]  # type: ignore[index]  # only routers have this hook
            counted += load(routing.experts, len(counted))

    def step(self) -> None:
        """Move every bias in place, and count anew."""
        for router, counted in self.loads.items():
            router.e_score_correction_bias.copy_(moved(router.e_score_correction_bias, counted, self.speed))
            counted.zero_()

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
