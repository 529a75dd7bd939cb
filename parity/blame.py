"""Which of the quantities that a candidate lacks are to blame for a wrong result.

What is missing need not be wrong, as a correct implementation may never form it. So a quantity is blamed if it is
missing, leads to a result that is wrong, and nothing between the two is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from parity.collect import Collect
from parity.watch import Name

SHOWN = 5  # names in one enumeration


class Chain:
    """Quantities of the reference in the order in which it forms them.

    Args:
        names: what they are called.
        values: what the reference has for them.
        leads: from which (rows) to which (columns) a path leads, [n, n].
        collected: what the candidate has.
        scale: what an error is relative to, where that is more than a quantity's own root mean square.
        whole: which of them are of all tokens; one that is right for some, as an expert's, excuses nothing before it.
    """

    def __init__(
        self,
        names: Sequence[Name],
        values: Sequence[Tensor],
        leads: Tensor,
        collected: Collect,
        scale: float = 0.0,
        whole: Sequence[bool] | None = None,
    ) -> None:
        self.names, self._values, self._leads, self._collected = names, values, leads, collected
        self._there = torch.tensor([collected.has(value, scale) for value in values])
        self._telling = torch.tensor([_is_telling(value) for value in values])
        self._witnesses = self._telling if whole is None else self._telling & torch.tensor(whole)

    def blamed(self, wrong: Sequence[int], sure: bool = True) -> list[int]:
        """The quantities to blame for wrong results, in order; the first is where the two sides part.

        Args:
            wrong: the results, as indices.
            sure: whether they are wrong whatever their numbers; else they are wrong if these are missing.
        """
        there = self._there.clone()
        there[wrong] &= not sure
        witnessed = (self._leads & there & self._witnesses).double() @ self._leads.double() > 0
        reaches = self._leads | torch.eye(len(self.names), dtype=torch.bool)
        return (~there & (reaches & ~witnessed)[:, wrong].any(1)).nonzero()[:, 0].tolist()

    def sentence(self, blamed: Sequence[int], when: str = "") -> str:
        """Where the two sides part, what else departs there, and what is right just before it and beside it."""
        first = blamed[0]
        too = [i for i in blamed[1:] if not self._leads[blamed, i].any()]
        right = [i for i in range(len(self.names)) if self._is_near(i, first) and i not in blamed]
        right = [i for i in right if not self._leads[i, right].any()]
        mixed = [i for i in right if not self._collected.has_in_order(self._values[i])]
        exact = [i for i in right if i not in mixed]
        parts = [
            f"first departs at {self.names[first]}{when}",
            *self._said("{} too", too, first),
            *self._said("with {} exact", exact, first),
            *self._said("with {} exact but for the order", mixed, first),
        ]
        return ", ".join(parts)

    def course(self) -> list[tuple[str, float]]:
        """How far the candidate is from each quantity, in the order in which the reference forms them."""
        return [
            (str(name), self._collected.distance(value)) for name, value in zip(self.names, self._values, strict=True)
        ]

    def _is_near(self, i: int, first: int) -> bool:
        """Whether the candidate has a quantity that leads to the first one, or stands beside it in the same module."""
        beside = self.names[i].owner == self.names[first].owner and not self._leads[first, i]
        return bool(self._there[i] & self._telling[i] & (self._leads[i, first] | beside))

    def _said(self, clause: str, indices: Sequence[int], near: int) -> Iterator[str]:
        """A clause about some quantities; the owner is left out where it is that of the one already named."""
        owner = self.names[near].owner
        names = [self.names[i].name if self.names[i].owner == owner else str(self.names[i]) for i in indices]
        names = list(dict.fromkeys(names))  # every expert has one of the same name
        if len(names) > SHOWN:
            names[SHOWN:] = [f"{len(names) - SHOWN} more"]
        if names:
            *most, last = names
            yield clause.format(f"{', '.join(most)} and {last}" if most else last)


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
