"""What a recurrence keeps of the tokens it has seen: tensors of a size to which no token adds.

A `StateCache` stands where a layer that attends has a cache of keys and values, and answers to the same calls but one:
what was mixed into a state cannot be taken out of it again.
"""

from collections.abc import Iterator

from jaxtyping import Bool, Float, Int
from torch import Tensor


class StateCache:
    """The states of one layer by name, each [batch, ...]. A state that was handed out is never written to."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, the size of the batch too."""
        self.length = 0
        self._states: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """The state of that name; None before the first token."""
        return self._states.get(name)

    def hold(self, tokens: int = 0, **states: Float[Tensor, "batch *state"]) -> None:
        """Keep these states in place of those of the same names, `tokens` later."""
        for name, state in states.items():
            before = self._states.get(name, state)
            if before.shape != state.shape:
                raise ValueError(
                    f"cannot keep {name} of shape {tuple(state.shape)} where {tuple(before.shape)} is: use a new cache,"
                    " or reset() this one, for another batch"
                )
            self._states[name] = state
        self.length += tokens

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._states.items())

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens: all of them, or none."""
        if length == 0:
            self.reset()
        elif length != self.length:
            raise ValueError(
                f"cannot crop from {self.length} to {length} tokens: a state does not tell them apart; keep a cache"
                " from before, or compute them again"
            )

    def select(self, rows: Int[Tensor, " kept"] | Bool[Tensor, " batch"]) -> None:
        """Keep these rows of the batch, given by index or by a boolean for each."""
        self._states = {name: state[rows] for name, state in self}

    def reorder(self, index: Int[Tensor, " batch"]) -> None:
        """Row i continues what row index[i] was, as in beam search."""
        self._states = {name: state.index_select(0, index) for name, state in self}

    def repeat(self, times: int) -> None:
        """Each row of the batch `times` times, neighbours."""
        self._states = {name: state.repeat_interleave(times, dim=0) for name, state in self}
