"""Which of the quantities that a candidate lacks are to blame for a wrong result.

What is missing need not be wrong, as a correct implementation may never form it. So a quantity is blamed if it is
missing, leads to a result that is wrong, and nothing between the two is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from parity.collect import contains
from parity.watch import Name

SHOWN = 4  # names in one enumeration


class Chain:
    """Quantities of the reference in the order in which it forms them.

    Args:
        names: what they are called.
        values: what the reference has for them.
        leads: from which (rows) to which (columns) a path leads, [n, n].
        numbers: all numbers that the candidate has, sorted.
        scale: what an error is relative to, where that is more than a quantity's own root mean square.
    """

    def __init__(
        self, names: Sequence[Name], values: Sequence[Tensor], leads: Tensor, numbers: Tensor, scale: float = 0.0
    ) -> None:
        self.names, self._leads = names, leads
        self._there = torch.tensor([contains(numbers, value, scale) for value in values])
        self._telling = torch.tensor([_is_telling(value) for value in values])

    def blamed(self, wrong: Sequence[int], sure: bool = True) -> list[int]:
        """The quantities to blame for wrong results, in order; the first is where the two sides part.

        Args:
            wrong: the results, as indices.
            sure: whether they are wrong whatever their numbers; else they are wrong if these are missing.
        """
        there = self._there.clone()
        there[wrong] &= not sure
        witnessed = (self._leads & there & self._telling).double() @ self._leads.double() > 0
        reaches = self._leads | torch.eye(len(self.names), dtype=torch.bool)
        return (~there & (reaches & ~witnessed)[:, wrong].any(1)).nonzero()[:, 0].tolist()

    def sentence(self, blamed: Sequence[int], when: str = "") -> str:
        """Where the two sides part, what else departs there, and what is right just before and beside it."""
        first, *others = blamed
        beside = [i for i in others if not self._leads[blamed, i].any()]
        exact = (self._there & self._telling & ~self._leads[first]).nonzero()[:, 0].tolist()
        nearest = [i for i in exact if i not in blamed and not self._leads[i, exact].any()]
        parts = [f"first departs at {self.names[first]}{when}"]
        if beside:
            parts.append(f"{self._listed(beside, first)} {'departs' if len(beside) == 1 else 'depart'} too")
        if nearest:
            parts.append(f"{self._listed(nearest, first)} {'is' if len(nearest) == 1 else 'are'} exact")
        return "; ".join(parts)

    def _listed(self, indices: Sequence[int], near: int) -> str:
        """An enumeration, with owners where they are not that of a quantity just named."""
        names, owner = [self.names[i] for i in indices[-SHOWN:]], self.names[near].owner
        *most, last = [name.name if name.owner == owner else str(name) for name in names]
        return f"{', '.join(most)} and {last}" if most else last


def _is_telling(value: Tensor) -> bool:
    """Whether a tensor holds other numbers than 0, 1 and -1."""
    return bool((value.detach() * (value.detach().abs() - 1)).any())


def paths(values: Sequence[Tensor]) -> Tensor:
    """Which value leads to which, [n, n], as autograd recorded it; one without a history, to all that follow it."""
    nodes = [get_gradient_edge(value).node if value.requires_grad else None for value in values]
    before = [set() if node is None else _ancestors(node) for node in nodes]
    found = torch.zeros(len(values), len(values), dtype=torch.bool)
    for i, node in enumerate(nodes):
        for j in range(len(nodes)):
            found[i, j] = i < j if node is None else node in before[j]
    return found


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        for parent, _ in waiting.pop().next_functions:
            if parent is not None and parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found
