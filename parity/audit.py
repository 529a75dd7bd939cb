"""Which precision the delicate operations ran in. An output in bfloat16 cannot show a softmax in bfloat16; this can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.compare import Judgement, Quantity

# To choose the largest is none: it rounds nothing, so logits in bfloat16 serve as well as their softmax in float32.
OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "_softmax": "softmax",
        "_log_softmax": "softmax",
        "exp": "softmax",
        "logsumexp": "softmax",
        "cos": "rotary angle",
        "sin": "rotary angle",
        "polar": "rotary angle",
        "rsqrt": "norm statistic",
        "sqrt": "norm statistic",
        "var_mean": "norm statistic",
        "native_layer_norm": "norm statistic",
        "sigmoid": "router score",
    }
)


class Audit(TorchDispatchMode):
    """Records, for every kind of delicate operation, the coarsest dtype it was computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest: dict[str, torch.dtype] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind = OPERATIONS.get(func.overloadpacket.__name__)
        if kind is not None and isinstance(args[0], Tensor) and args[0].is_floating_point():
            dtype = args[0].dtype
            if kind not in self.coarsest or _eps(dtype) > _eps(self.coarsest[kind]):
                self.coarsest[kind] = dtype
        return func(*args, **(kwargs or {}))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def audit(run: Callable[[], Any]) -> dict[str, torch.dtype]:
    """The coarsest dtype of every kind of delicate operation in a run."""
    with Audit() as record:
        run()
    return record.coarsest


def judge_precision(
    candidate: Mapping[str, torch.dtype], reference: Mapping[str, torch.dtype], name: str
) -> list[Judgement]:
    """The candidate may run nothing coarser than the reference; what only one of them runs is not compared.

    The error is the machine epsilon of the dtype used, what is allowed that of the reference's.
    """
    judgements = []
    for kind in sorted(candidate.keys() & reference.keys()):
        used, allowed = _eps(candidate[kind]), _eps(reference[kind])
        judgements.append(Judgement(Quantity(kind, "precision"), name, used, used, allowed, allowed))
    return judgements
