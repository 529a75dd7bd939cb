"""What the reference carries from chunk to chunk where it is a recurrence: held by it in lists or in its own caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class States:
    """A recurrence's states where the reference has them in a list, of all layers, [rows, channels, layers].

    The last of the list is the exponent of the others, which begins at minus infinity, or what stands for it.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.tensors: list[Tensor] | None = None

    def given(self, rows: int) -> list[Tensor]:
        """What the next call is given."""
        if self.tensors is None:
            shape = (rows, self.config.hidden_size, self.config.num_hidden_layers)
            wide = torch.promote_types(self.dtype, torch.float32)
            self.tensors = [torch.zeros(shape, dtype=each) for each in (self.dtype, self.dtype, wide, wide, wide)]
            self.tensors[-1] -= 1e30
        return self.tensors

    def take(self, returned: Any) -> None:
        """Keep what a call returned."""
        self.tensors = list(returned[1] if isinstance(returned, tuple) else returned.state)


def state_contents(cache: Any, names: Sequence[str], only: int | None = None) -> list[tuple[str, Tensor]]:
    """The states that a cache holds, by name, [rows, ...]: of one layer, or of every layer that has been reached.

    Copies, as the reference writes the next state over the last.
    """
    if isinstance(cache, States):
        layers = list(zip(*(tensor.unbind(-1) for tensor in cache.tensors or ()), strict=True))
    else:
        layers = [(*layer.conv_states.values(), *layer.recurrent_states.values()) for layer in cache.layers]
    return [
        (f"layer {index} {name}", state.clone())
        for index, states in enumerate(layers)
        if only in (None, index)
        for name, state in zip(names if states else (), states, strict=True)
        if name
    ]
