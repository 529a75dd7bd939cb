"""Attention (Vaswani et al. 2017, arXiv:1706.03762, section 3.2) with grouped heads (Ainslie et al. 2023, 2305.13245).

Letters of the einsums: b batch, k key/value head, g member of its group of query heads, q query, s key, d channel.
Query head h reads key/value head h // group, so a view with two axes for the heads takes the place of repeated keys.

Three exchangeable implementations of the scaled dot product compute the same function. A row without any key is where
implementations differ; the rule here: its context is 0, and no gradient flows through it.
"""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.cache import CrossCache, GrowingCache
from reimpl.mask import CAUSAL, Mask, MemoryMask, causal
from reimpl.precision import wide
from reimpl.rope import Pairing, rotate

Bias = Float[Tensor, "#batch #heads #q k"] | None
"""Added to the scaled scores, as ALiBi does."""


def eager(
    q: Float[Tensor, "batch heads q dim"],
    k: Float[Tensor, "batch kv_heads k dim"],
    v: Float[Tensor, "batch kv_heads k value_dim"],
    mask: Mask,
    scale: float,
    bias: Bias = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads q value_dim"]:
    """softmax(q k^T scale + bias) v as it is written, with all scores in memory and the softmax in at least float32."""
    kv_heads, allowed = k.shape[1], _as_tensor(mask, q, k)
    scores = _products(_grouped(q * scale, kv_heads), k)
    if bias is not None:
        scores = scores + _grouped(bias, kv_heads)
    if allowed is not None:
        allowed = _grouped(allowed, kv_heads)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)  # finite, or a row without keys is NaN
    weights = scores.softmax(-1, dtype=wide(q)).to(q.dtype)
    context = _weighted(F.dropout(weights, dropout) if dropout else weights, v)
    if allowed is not None:
        context = context.masked_fill(~allowed.any(-1, keepdim=True), 0)
    return context.flatten(1, 2)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q k^T, the queries of a group in one product.

    Where they are few, keys on the left are read faster; not so in half precision, where torch copies keys of several
    heads that do not lie side by side, as in a cache with room, and does so slowly unless it is told to.
    """
    rows = q.flatten(2, 3)
    if q.shape[3] == 1 and (k.shape[1] == 1 or k.dtype == wide(k)):
        products = (k @ rows.mT).mT
    else:
        products = rows @ k.contiguous().mT
    return products.unflatten(2, q.shape[2:4])


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """The sum of the values with the weights of each query."""
    return (weights.flatten(2, 3) @ v).unflatten(2, weights.shape[2:4])


def fused(
    q: Float[Tensor, "batch heads q dim"],
    k: Float[Tensor, "batch kv_heads k dim"],
    v: Float[Tensor, "batch kv_heads k value_dim"],
    mask: Mask,
    scale: float,
    bias: Bias = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads q value_dim"]:
    """torch's kernel, without repeated keys and, where it can, without a mask."""
    narrow = k.shape[-1] - v.shape[-1]
    if narrow > 0 and not _multiplies(q.dtype):  # for one width there is a kernel, and all else is slower here
        return fused(q, k, F.pad(v, (0, narrow)), mask, scale, bias, dropout)[..., :-narrow]
    if q.shape[2] == 1:
        decode = eager if _outlasts_kernel(q, k, v) else _fused_decode
        return decode(q, k, v, mask, scale, bias, dropout)
    if not (isinstance(mask, Tensor) or bias is not None or dropout) and _outruns_kernel(q, k, v):
        return _in_blocks(q * scale, k, v, mask is CAUSAL)
    # The kernel aligns its own causal mask top-left, which is the same for as many queries as keys only.
    is_causal = mask is CAUSAL and q.shape[2] == k.shape[2] and bias is None
    allowed = None if is_causal else _as_tensor(mask, q, k)
    return _kernel(q, k, v, allowed, scale, bias, dropout, is_causal)


def _fused_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, bias: Tensor | None, dropout: float
) -> Tensor:
    """A single query: the members of a group become the queries of their key/value head, which reads its keys once."""
    kv_heads, allowed = k.shape[1], _as_tensor(mask, q, k)
    if allowed is not None:
        allowed = _members(allowed, kv_heads)
    if bias is not None:
        bias = _members(bias, kv_heads)
    context = _kernel(_members(q, kv_heads), k, v, allowed, scale, bias, dropout)
    return context.reshape(*q.shape[:3], v.shape[-1])


def _outlasts_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a single query has so many keys that two matrix products read them faster than the kernel, on a CPU."""
    if v.shape[-1] != k.shape[-1]:
        return True  # there is no kernel then: torch itself takes matrix products, and copies more
    if k.dtype != wide(k) and q.shape[1] == k.shape[1]:
        return k.numel() >= 2**16  # there the kernel is 2 to 4 times as slow
    return k.numel() >= 2**20 and _multiplies(k.dtype)


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies matrices of this dtype; if not, torch is up to 20 times slower than in float32.

    Its kernel for attention widens what it reads and hardly suffers.
    """
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in native or bool(native[dtype]())


def _members(x: Tensor, kv_heads: int) -> Tensor:
    """The members of each group on the axis of the single query; a single head serves all of them."""
    return x if x.shape[1] == 1 else x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def _outruns_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether blocks of queries are faster: than the kernel in bfloat16, if the processor multiplies such, and where
    values have a width for which there is no kernel.
    """
    slow = (q.dtype is torch.bfloat16 and _multiplies(q.dtype)) or v.shape[-1] != k.shape[-1]
    return slow and 128 <= q.shape[2] <= k.shape[2] and not torch.is_grad_enabled()


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Some scaled queries at a time; causal ones with only the keys that the last of them sees, masked in place."""
    rows = 128 if is_causal else 1024  # the more, the faster; but causal ones see more keys in vain
    later, context = ~causal(rows, rows, q.device), []
    k, v = k.contiguous(), v.contiguous()  # or every product would copy them, where they do not lie side by side
    unseen = q.shape[2] if is_causal else 0
    for block in _grouped(q, k.shape[1]).split(rows, dim=3):
        new = block.shape[3]
        unseen = max(0, unseen - new)
        seen = k.shape[2] - unseen
        scores = _products(block, k[:, :, :seen]).contiguous()
        if is_causal:
            scores[..., -new:].masked_fill_(later[:new, :new], -torch.inf)
        for some in scores.view(-1, seen).split(128):  # so few that what is wide stays in the processor's cache
            some.copy_(some.softmax(-1, dtype=wide(q)))
        context.append(_weighted(scores, v[:, :, :seen]))
    return torch.cat(context, dim=3).flatten(1, 2)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, mended where a row has no key: there its gradient is wrong."""
    has_key = None
    if allowed is not None and torch.is_grad_enabled():
        has_key = allowed.any(-1, keepdim=True)
        allowed = allowed | ~has_key
    if bias is not None:
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    grouped = q.shape[1] != k.shape[1]
    context = F.scaled_dot_product_attention(q, k, v, allowed, dropout, is_causal, scale=scale, enable_gqa=grouped)
    return context if has_key is None else context.masked_fill(~has_key, 0)


def tiled(
    q: Float[Tensor, "batch heads q dim"],
    k: Float[Tensor, "batch kv_heads k dim"],
    v: Float[Tensor, "batch kv_heads k value_dim"],
    mask: Mask,
    scale: float,
    bias: Bias = None,
    dropout: float = 0.0,
    tile: int = 128,
) -> Float[Tensor, "batch heads q value_dim"]:
    """One tile of keys at a time, with an online softmax (FlashAttention, Dao et al. 2022, 2205.14135, section 3.1).

    `top` is the largest score so far and `total` the sum of exp(score - top); both, and the context, are rescaled when
    a later tile holds a larger score. A tile is computed in at least float32, as the fused kernels do.
    """
    kv_heads, dtype, allowed = k.shape[1], wide(q), _as_tensor(mask, q, k)
    given, q = q.dtype, _grouped(q, kv_heads).to(dtype)
    top = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top)
    context = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for start in range(0, k.shape[2], tile):
        keys = slice(start, start + tile)
        scores = torch.einsum("bkgqd,bksd->bkgqs", q, k[:, :, keys].to(dtype)) * scale
        if bias is not None:
            scores = scores + _grouped(bias[..., keys], kv_heads)
        if allowed is not None:
            scores = scores.masked_fill(~_grouped(allowed[..., keys], kv_heads), -torch.inf)
        # The result does not depend on the shift, so no gradient flows through it; it is 0 as long as no key was seen.
        highest = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        shift = highest.masked_fill(highest == -torch.inf, 0)
        rescale, weights = (top - shift).exp(), (scores - shift).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        weights = F.dropout(weights, dropout) if dropout else weights
        context = context * rescale + torch.einsum("bkgqs,bksd->bkgqd", weights, v[:, :, keys].to(dtype))
        top = highest
    return (context / total.masked_fill(total == 0, 1)).to(given).flatten(1, 2)


ScaledDotProduct = Callable[..., Tensor]
IMPLEMENTATIONS: dict[str, ScaledDotProduct] = {"eager": eager, "fused": fused, "tiled": tiled}


class MultiHead(nn.Module):
    """What every attention does with its queries, keys and values, however it came by them.

    `attend` may be any function like those in `IMPLEMENTATIONS`. `upcast` computes scores and context in at least
    float32, whatever comes in.
    """

    def __init__(
        self,
        head_dim: int,
        scale: float | None = None,
        dropout: float = 0.0,
        implementation: str = "fused",
        upcast: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.dropout, self.upcast = head_dim, dropout, upcast
        self.scale = head_dim**-0.5 if scale is None else scale
        self.attend = IMPLEMENTATIONS[implementation]

    def split(self, x: Float[Tensor, "batch seq channels"]) -> Float[Tensor, "batch heads seq dim"]:
        """The channels as heads."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def mix(
        self,
        q: Float[Tensor, "batch heads q dim"],
        k: Float[Tensor, "batch kv_heads k dim"],
        v: Float[Tensor, "batch kv_heads k value_dim"],
        mask: Mask,
        bias: Bias = None,
    ) -> Float[Tensor, "batch q channels"]:
        """The context of every query, its heads joined."""
        dtype, dropout = q.dtype, self.dropout if self.training else 0.0
        if self.upcast:
            q, k, v = q.to(wide(q)), k.to(wide(k)), v.to(wide(v))
        context = self.attend(q, k, v, mask, self.scale, bias, dropout)
        return context.to(dtype).transpose(1, 2).flatten(2)


class Attention(MultiHead):
    """Grouped-query attention of a sequence to itself; multi-head where kv_heads == heads, multi-query where it is 1.

    Rotated keys enter the cache.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        dropout: float = 0.0,
        implementation: str = "fused",
        pairing: Pairing = "half",
    ) -> None:
        super().__init__(head_dim, dropout=dropout, implementation=implementation)
        self.pairing = pairing
        self.q_proj = nn.Linear(size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, size, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        rotary: tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]] | None = None,
        mask: Mask = None,
        cache: GrowingCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        q, k, v = self.project(x)
        if rotary is not None:
            q, k = self.turn(q, k, *rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(self.mix(q, k, v, mask))

    def project(
        self, x: Float[Tensor, "batch seq size"]
    ) -> tuple[
        Float[Tensor, "batch heads seq dim"],
        Float[Tensor, "batch kv_heads seq dim"],
        Float[Tensor, "batch kv_heads seq dim"],
    ]:
        """Queries, keys and values of each head, before rotation."""
        return self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def turn(
        self,
        q: Float[Tensor, "batch heads seq dim"],
        k: Float[Tensor, "batch kv_heads seq dim"],
        cos: Float[Tensor, "#batch seq rotary"],
        sin: Float[Tensor, "#batch seq rotary"],
    ) -> tuple[Float[Tensor, "batch heads seq dim"], Float[Tensor, "batch kv_heads seq dim"]]:
        """Queries and keys, rotated by the angles of their positions."""
        if q.shape[2] == 1:  # so little work that the number of operations counts: one rotation for both
            turned = rotate(torch.cat((q, k), dim=1), cos, sin, self.pairing)
            return turned[:, : q.shape[1]], turned[:, q.shape[1] :]
        return rotate(q, cos, sin, self.pairing), rotate(k, cos, sin, self.pairing)


class CrossAttention(MultiHead):
    """Attention of a sequence to another, the memory that an encoder left (Vaswani et al. 2017, section 3.2.3).

    The mask tells the memory's tokens from its padding; nothing is causal. A cache keeps the memory's keys and values,
    computed in the first call. A subclass has the projections.
    """

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        memory: Float[Tensor, "batch memory memory_size"],
        mask: MemoryMask = None,
        cache: CrossCache | None = None,
    ) -> Float[Tensor, "batch seq channels"]:
        k, v = self.project(memory) if cache is None else cache.recall(lambda: self.project(memory))
        return self.mix(self.query_heads(x), k, v, mask)

    def query_heads(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch heads seq dim"]:
        raise NotImplementedError

    def project(
        self, memory: Float[Tensor, "batch memory memory_size"]
    ) -> tuple[Float[Tensor, "batch heads memory dim"], Float[Tensor, "batch heads memory dim"]]:
        """Keys and values of the memory."""
        raise NotImplementedError


def check_memory(memory: Tensor | None, crosses: bool) -> None:
    """Refuse a memory that no layer attends to: it would be ignored."""
    if memory is not None and not crosses:
        raise ValueError("a memory is given, but no layer attends to it: set add_cross_attention, or leave it out")


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """The axis of the heads as two; a single head, of a mask or a bias, serves all of them."""
    return x.unsqueeze(1) if x.shape[1] == 1 else x.unflatten(1, (kv_heads, -1))


def _as_tensor(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask, where it forbids anything: the last query sees every key, so a single causal one needs none."""
    if mask is not CAUSAL:
        return mask
    return None if q.shape[2] == 1 else causal(q.shape[2], k.shape[2], q.device)[None, None]
