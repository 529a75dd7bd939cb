"""What a layer keeps of the tokens it has seen, so that the next token need not compute them again.

Four kinds: `GrowingCache` keeps every key and value, `SlidingCache` the last window - 1 of them, `LatentCache` the
compressed keys and values of multi-head latent attention (DeepSeek-V2, section 2.1), `CrossCache` the projected memory
of an encoder, computed once. `Cache` holds one of them per layer; a decoder layer that has both its own tokens and a
memory to keep holds a `Cache` of two, a `DecoderCache`.

Two choices hold for all of them, and implementations differ in both:

* Rows are written once. A tensor that `append` handed out never changes afterwards: new rows are written behind the
  part that was ever handed out, and after `crop` gave rows back, the next append moves to storage of its own. So what
  an earlier step returned can still be compared later, and a crop cannot leave a stale tail.
* Storage is allocated ahead and doubled when full, hence a step writes one row where concatenation copies all of them.
  A few rows are concatenated all the same, which is quicker, and so are all while autograd records, as a tensor saved
  for backward must not be written to.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from reimpl.state import StateCache

WORTH_ROOM = 2**14
"""From so many numbers on, writing a row into its place is quicker than copying all rows (about 50 kB on a CPU)."""


def allocate(shape: Sequence[int], like: Tensor) -> Tensor:
    """Uninitialised storage. A test replaces this function by one that fills every slot with NaN."""
    with torch.inference_mode(False):  # what is allocated inside inference_mode cannot be written to outside of it
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class LayerCache:
    """What the caches of one layer share: two tensors that grow along their axis -2, the axis of the tokens.

    Both are the rows from `_start` to `_end` of a storage; those before `_shown` were handed out. `capacity` is the
    number of rows to allocate at first, where it is known; the first rows are kept as they come.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity or 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, the size of the batch too."""
        self.length = 0
        self._storage: tuple[Tensor, Tensor] | None = None
        self._start = self._end = self._shown = 0

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The two tensors, as far as they are filled."""
        if self._storage is None:
            raise ValueError("nothing was appended to this cache yet, so it holds no tensor")
        (first, second), rows = self._storage, self._end - self._start
        if rows == first.shape[-2]:
            return self._storage
        return first.narrow(-2, self._start, rows), second.narrow(-2, self._start, rows)

    def _append(self, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows to both tensors; all that they hold then."""
        if self._storage is None:
            self._hold(*new)
        else:
            _check(self._storage, new)
            if torch.is_grad_enabled() or self._storage[0].numel() < WORTH_ROOM:
                first, second = self.held
                self._hold(torch.cat((first, new[0]), dim=-2), torch.cat((second, new[1]), dim=-2))
            else:
                self._write(self._storage, new)
        self._shown = self._end
        self.length += new[0].shape[-2]
        return self.held

    def _write(self, storage: tuple[Tensor, Tensor], new: tuple[Tensor, ...]) -> None:
        rows = new[0].shape[-2]
        if self._end + rows > storage[0].shape[-2] or self._end < self._shown:
            storage = self._move(rows)
        storage[0].narrow(-2, self._end, rows).copy_(new[0])
        storage[1].narrow(-2, self._end, rows).copy_(new[1])
        self._end += rows

    def _move(self, more: int) -> tuple[Tensor, Tensor]:
        """Go over to new storage, with room for `more` rows and as many again."""
        held, rows = self.held, self._end - self._start
        room = self.capacity if self.capacity >= rows + more else 2 * (rows + more)
        first, second = (allocate((*old.shape[:-2], room, old.shape[-1]), old) for old in held)
        first.narrow(-2, 0, rows).copy_(held[0])
        second.narrow(-2, 0, rows).copy_(held[1])
        self._storage, self._start, self._end = (first, second), 0, rows
        return first, second

    def _hold(self, first: Tensor, second: Tensor) -> None:
        """Keep tensors without room to grow. They are never written to, so they may be the caller's."""
        self._storage, self._start, self._end = (first, second), 0, first.shape[-2]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, as when a draft is rejected."""
        self._crop(length, length)

    def _crop(self, length: int, held: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} tokens: the cache has seen {self.length}")
        self._end = min(self._end, self._start + held)
        self.length = length

    def select(self, rows: Int[Tensor, " kept"] | Bool[Tensor, " batch"]) -> None:
        """Keep these rows of the batch, given by index or by a boolean for each."""
        self._map_batch(lambda held: held[rows])

    def reorder(self, index: Int[Tensor, " batch"]) -> None:
        """Row i continues what row index[i] was, as in beam search."""
        self._map_batch(lambda held: held.index_select(0, index))

    def repeat(self, times: int) -> None:
        """Each row of the batch `times` times, neighbours."""
        self._map_batch(lambda held: held.repeat_interleave(times, dim=0))

    def _map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._storage is not None:
            self._hold(*map(function, self.held))


def _check(storage: tuple[Tensor, Tensor], new: tuple[Tensor, ...]) -> None:
    """Refuse rows of another shape: writing would broadcast a batch of one over all rows, in silence."""
    for there, rows in zip(storage, new, strict=True):
        if rows.shape[:-2] != there.shape[:-2] or rows.shape[-1] != there.shape[-1]:
            raise ValueError(
                f"cannot append {tuple(rows.shape)} to a cache of {tuple(there.shape)}: all but the axis of the tokens,"
                " the last but one, must agree; use a new cache, or reset() this one, for another batch"
            )


class GrowingCache(LayerCache):
    """Keys and values of every token."""

    @property
    def keys(self) -> Float[Tensor, "batch kv_heads length head_dim"]:
        return self.held[0]

    @property
    def values(self) -> Float[Tensor, "batch kv_heads length value_dim"]:
        return self.held[1]

    def append(
        self, keys: Float[Tensor, "batch kv_heads new head_dim"], values: Float[Tensor, "batch kv_heads new value_dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """Add the keys and values of new tokens; those of all tokens."""
        return self._append(keys, values)


class SlidingCache(GrowingCache):
    """Keys and values of the last window - 1 tokens: what the next token can see besides itself.

    `append` returns what was kept before together with all that is new, since the first of the new tokens still sees
    the window before it. `length` counts every token seen, kept or not.
    """

    def __init__(self, window: int):
        super().__init__()
        if window < 1:
            raise ValueError(f"a window holds at least the token itself, not {window}")
        self.window = window

    def append(
        self, keys: Float[Tensor, "batch kv_heads new head_dim"], values: Float[Tensor, "batch kv_heads new value_dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads seen head_dim"], Float[Tensor, "batch kv_heads seen value_dim"]]:
        """Add the keys and values of new tokens; those of the new tokens and of the window before them."""
        seen = self._append(keys, values)
        self._start = max(self._start, self._end - (self.window - 1))
        return seen

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Those that left the window are gone, so they must not be needed again."""
        needed = min(length, self.window - 1)
        held = max(0, self._end - self._start - (self.length - length))
        if held < needed:
            raise ValueError(
                f"cannot crop from {self.length} to {length} tokens: the next token sees {needed} of those before it,"
                f" and {held} are still held; crop before the window of {self.window} is full, or compute them again"
            )
        self._crop(length, held)


class LatentCache(LayerCache):
    """What multi-head latent attention keeps of a token: one latent vector and one rotated key, shared by all heads."""

    @property
    def latents(self) -> Float[Tensor, "batch length rank"]:
        return self.held[0]

    @property
    def rope_keys(self) -> Float[Tensor, "batch length rope_dim"]:
        return self.held[1]

    def append(
        self, latents: Float[Tensor, "batch new rank"], rope_keys: Float[Tensor, "batch new rope_dim"]
    ) -> tuple[Float[Tensor, "batch length rank"], Float[Tensor, "batch length rope_dim"]]:
        """Add the latents and rotated keys of new tokens; those of all tokens."""
        return self._append(latents, rope_keys)


class CrossCache(GrowingCache):
    """Keys and values of an encoder's memory: appended once, read at every step, untouched by `crop`.

    So they are kept with the rows of each head side by side, where a projection leaves those of each token.
    """

    def append(
        self, keys: Float[Tensor, "batch kv_heads new head_dim"], values: Float[Tensor, "batch kv_heads new value_dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """Fill the cache; refused if it is filled."""
        if self.length:
            raise ValueError(f"a memory of {self.length} tokens is cached already; reset() the cache for another one")
        return self._append(keys.contiguous(), values.contiguous())

    def recall(
        self, project: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """The memory's keys and values, which `project` computes unless they are there."""
        return self.held if self.length else self.append(*project())

    def crop(self, length: int) -> None:
        """The memory does not depend on how many tokens were decoded."""


class Cache:
    """The caches of all layers, in order. What is done to it is done to each of them."""

    def __init__(self, layers: Iterable["LayerCache | StateCache | Cache"]):
        self.layers = list(layers)

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator["LayerCache | StateCache | Cache"]:
        return iter(self.layers)

    @property
    def length(self) -> int:
        """The number of tokens seen, which is the position of the next one."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        for layer in self.layers:
            layer.crop(length)

    def select(self, rows: Int[Tensor, " kept"] | Bool[Tensor, " batch"]) -> None:
        for layer in self.layers:
            layer.select(rows)

    def reorder(self, index: Int[Tensor, " batch"]) -> None:
        for layer in self.layers:
            layer.reorder(index)

    def repeat(self, times: int) -> None:
        for layer in self.layers:
            layer.repeat(times)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()


class DecoderCache(Cache):
    """The two caches of one decoder layer that attends to a memory: of its own tokens, and of the memory's."""

    def __init__(self, capacity: int | None = None):
        self.own, self.cross = GrowingCache(capacity), CrossCache()
        super().__init__((self.own, self.cross))
