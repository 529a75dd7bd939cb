"""RMSNorm by the sum of squares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from parity.meta.second.part import Part, empty, normed


class Norm(Part):
    """x over its root mean square, times a gain."""

    MAKES = frozenset(
        {
            "ignores the epsilon of the norms",
            "adds the epsilon outside of the root",
            "subtracts the mean",
            "divides squares by n - 1",
            "sums squares for their mean",
            "forgets the gains",
            "adds 1 to the gains",
            "detaches the statistic of the norm",
        }
    )

    def __init__(self, config: Any, wrong: Iterable[str] = ()) -> None:
        super().__init__(wrong)
        self.weight, self.eps = empty(config.hidden_size), config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-6 if self.does("ignores the epsilon of the norms") else self.eps
        return normed(x, self.weight, eps, self.does)
