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
  While autograd records, rows are concatenated all the same, as a tensor saved for backward must not be written to.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def allocate(shape: Sequence[int], like: Tensor) -> Tensor:
    """Uninitialised storage. A test replaces this function by one that fills every slot with NaN."""
    with torch.inference_mode(False):  # what is allocated inside inference_mode cannot be written to outside of it
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class Rows:
    """A tensor that grows along its axis -2, the axis of the tokens: the rows from `start` to `end` of a storage.

    `capacity` is the number of rows to allocate at first, where it is known; the first rows are kept as they come.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity or 0
        self.clear()

    def clear(self) -> None:
        self.storage: Tensor | None = None
        self.start = self.end = self.shown = 0  # rows before `shown` were handed out

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def filled(self) -> Tensor:
        if self.storage is None:
            raise ValueError("nothing was appended to this cache yet, so it holds no tensor")
        return self.storage.narrow(-2, self.start, len(self))

    def append(self, new: Tensor) -> Tensor:
        """Add rows; all of them, old and new."""
        if self.storage is None:
            storage = self._hold(new)
        elif torch.is_grad_enabled():
            storage = self._hold(torch.cat([self.filled, new], dim=-2))
        else:
            storage = self._write(self.storage, new)
        self.shown = self.end
        return storage.narrow(-2, self.start, len(self))

    def check(self, new: Tensor) -> None:
        """Refuse rows of another shape: writing would broadcast a batch of one over all rows, in silence."""
        held = new if self.storage is None else self.storage
        if (*new.shape[:-2], new.shape[-1]) == (*held.shape[:-2], held.shape[-1]):
            return
        raise ValueError(
            f"cannot append {tuple(new.shape)} to a cache that holds {tuple(self.filled.shape)}: all but the axis"
            " of the tokens, the last but one, must agree; use a new cache, or reset() this one, for another batch"
        )

    def _write(self, storage: Tensor, new: Tensor) -> Tensor:
        rows = new.shape[-2]
        if self.end + rows > storage.shape[-2] or self.end < self.shown:
            storage = self._move(storage, rows)
        storage.narrow(-2, self.end, rows).copy_(new)
        self.end += rows
        return storage

    def _move(self, storage: Tensor, more: int) -> Tensor:
        """Go over to new storage, with room for `more` rows and as many again."""
        rows, needed = len(self), len(self) + more
        room = self.capacity if self.capacity >= needed else 2 * needed
        moved = allocate((*storage.shape[:-2], room, storage.shape[-1]), storage)
        moved.narrow(-2, 0, rows).copy_(storage.narrow(-2, self.start, rows))
        self.storage, self.start, self.end, self.shown = moved, 0, rows, 0
        return moved

    def _hold(self, rows: Tensor) -> Tensor:
        """Keep a tensor without room to grow. It is never written to, so it may be the caller's."""
        self.storage, self.start, self.end, self.shown = rows, 0, rows.shape[-2], rows.shape[-2]
        return rows

    def keep_first(self, rows: int) -> None:
        self.end = self.start + min(rows, len(self))

    def keep_last(self, rows: int) -> None:
        self.start = self.end - min(rows, len(self))

    def map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows by a function of them that returns a new tensor and leaves the axis of the tokens alone."""
        if self.storage is not None:
            self._hold(function(self.filled))


class LayerCache:
    """What the caches of one layer share: two tensors that grow together, and operations on their batch axis."""

    def __init__(self, capacity: int | None = None):
        self._first, self._second = Rows(capacity), Rows(capacity)
        self.length = 0

    def _append(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        self._first.check(first)
        self._second.check(second)
        seen = self._first.append(first), self._second.append(second)
        self.length += first.shape[-2]
        return seen

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, as when a draft is rejected."""
        self._crop(length, length)

    def _crop(self, length: int, held: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} tokens: the cache has seen {self.length}")
        self._first.keep_first(held)
        self._second.keep_first(held)
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

    def reset(self) -> None:
        """Forget everything, the size of the batch too."""
        self._first.clear()
        self._second.clear()
        self.length = 0

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The two tensors, as far as they are filled."""
        return self._first.filled, self._second.filled

    def _map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        self._first.map_batch(function)
        self._second.map_batch(function)


class GrowingCache(LayerCache):
    """Keys and values of every token."""

    @property
    def keys(self) -> Float[Tensor, "batch kv_heads length head_dim"]:
        return self._first.filled

    @property
    def values(self) -> Float[Tensor, "batch kv_heads length value_dim"]:
        return self._second.filled

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
        self._first.keep_last(self.window - 1)
        self._second.keep_last(self.window - 1)
        return seen

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Those that left the window are gone, so they must not be needed again."""
        needed = min(length, self.window - 1)
        held = max(0, len(self._first) - (self.length - length))
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
        return self._first.filled

    @property
    def rope_keys(self) -> Float[Tensor, "batch length rope_dim"]:
        return self._second.filled

    def append(
        self, latents: Float[Tensor, "batch new rank"], rope_keys: Float[Tensor, "batch new rope_dim"]
    ) -> tuple[Float[Tensor, "batch length rank"], Float[Tensor, "batch length rope_dim"]]:
        """Add the latents and rotated keys of new tokens; those of all tokens."""
        return self._append(latents, rope_keys)


class CrossCache(GrowingCache):
    """Keys and values of an encoder's memory: appended once, read at every step, untouched by `crop`."""

    def append(
        self, keys: Float[Tensor, "batch kv_heads new head_dim"], values: Float[Tensor, "batch kv_heads new value_dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """Fill the cache; refused if it is filled."""
        if self.length:
            raise ValueError(f"a memory of {self.length} tokens is cached already; reset() the cache for another one")
        return self._append(keys, values)

    def recall(
        self, project: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """The memory's keys and values, which `project` computes unless they are there."""
        return self.held if self.length else self.append(*project())

    def crop(self, length: int) -> None:
        """The memory does not depend on how many tokens were decoded."""


class Cache:
    """The caches of all layers, in order. What is done to it is done to each of them."""

    def __init__(self, layers: Iterable["LayerCache | Cache"]):
        self.layers = list(layers)

    def __getitem__(self, layer: int) -> "LayerCache | Cache":
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator["LayerCache | Cache"]:
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
