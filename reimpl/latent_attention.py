"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from one small latent.

Letters of the einsums: b batch, h head, q query, s key, c channel of the latent, n channel of a key without position,
v channel of a value.

Of a token only its latent and one rotated key, shared by all heads, are cached. Two exchangeable forms compute the
same: `expanded` makes keys and values of every head from the latents, then attends; `absorbed` takes the matrix that
makes the keys to the query's side and the one that makes the values behind the attention, which then runs over the
latents alone.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reimpl.attention import IMPLEMENTATIONS, ScaledDotProduct
from reimpl.cache import LatentCache
from reimpl.mask import Mask
from reimpl.norm import RMSNorm
from reimpl.rope import Pairing, rotate

LATENT_EPS = 1e-6
"""Of the norms of the latents, whatever the config's rms_norm_eps says: so the models were trained."""


def expanded(
    q: Float[Tensor, "batch heads q nope"],
    q_rope: Float[Tensor, "batch heads q rope"],
    latents: Float[Tensor, "batch k rank"],
    k_rope: Float[Tensor, "batch k rope"],
    up: Float[Tensor, "heads nope_and_value rank"],
    attend: ScaledDotProduct,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads q value"]:
    """softmax([q, q_rope] [k, k_rope]^T scale) v, with k and v of every head made from the latents by `up`."""
    nope = q.shape[-1]
    k, v = torch.einsum("bsc,hdc->bhsd", latents, up).tensor_split((nope,), dim=-1)
    k_rope = k_rope[:, None].expand(-1, q.shape[1], -1, -1)
    return attend(torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1), v, mask, scale, dropout=dropout)


def absorbed(
    q: Float[Tensor, "batch heads q nope"],
    q_rope: Float[Tensor, "batch heads q rope"],
    latents: Float[Tensor, "batch k rank"],
    k_rope: Float[Tensor, "batch k rope"],
    up: Float[Tensor, "heads nope_and_value rank"],
    attend: ScaledDotProduct,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads q value"]:
    """q (W c) = (q W) c: the query times the keys' part of `up` meets the latents, of which all heads share one.

    The weighted latents are made values at the end, since sum_s w_s (V c_s) = V sum_s w_s c_s.
    """
    make_k, make_v = up.tensor_split((q.shape[-1],), dim=1)
    q = torch.cat((torch.einsum("bhqn,hnc->bhqc", q, make_k), q_rope), -1)
    k = torch.cat((latents, k_rope), -1)
    context = attend(q, k[:, None], latents[:, None], mask, scale, dropout=dropout)
    return torch.einsum("bhqc,hvc->bhqv", context, make_v)


FORMS: dict[str, Callable[..., Tensor]] = {"expanded": expanded, "absorbed": absorbed}


def cheaper(queries: int, keys: int, up: Float[Tensor, "heads nope_and_value rank"]) -> str:
    """The form with fewer multiplications: a decoding step absorbs, a prefill expands.

    Per head, expanding costs a column of `up` for every key, absorbing one for every query; each score and its value
    then cost as many channels as two latents have, or a key and a value.
    """
    channels, rank = up.shape[1:]
    return "absorbed" if queries * keys * (2 * rank - channels) < (keys - queries) * channels * rank else "expanded"


class LatentAttention(nn.Module):
    """Attention of a sequence to itself through latents. Queries have a latent, too, where `q_rank` is given.

    `attend` may be any scaled dot product, `form` one of `FORMS` or `auto`, the cheaper one at each call. The rotated
    channels of queries and keys are stored in half layout, whatever the `pairing` they were trained for.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope: int,
        rope: int,
        value: int,
        scale: float,
        bias: bool = False,
        dropout: float = 0.0,
        pairing: Pairing = "adjacent",
        implementation: str = "fused",
        form: str = "auto",
    ) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.value, self.kv_rank = heads, nope, rope, value, kv_rank
        self.scale, self.dropout, self.pairing = scale, dropout, pairing
        self.attend, self.form = IMPLEMENTATIONS[implementation], form
        if q_rank is None:
            self.q_proj = nn.Linear(size, heads * (nope + rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(size, q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(q_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, kv_rank + rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(kv_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, size, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        rotary: tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]],
        mask: Mask = None,
        cache: LatentCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        q, q_rope = self.queries(x).split((self.nope, self.rope), dim=-1)
        latents, k_rope = self.kv_a_proj_with_mqa(x).split((self.kv_rank, self.rope), dim=-1)
        latents = self.kv_a_layernorm(latents)
        q_rope, k_rope = self.turn(q_rope, k_rope, *rotary)
        if cache is not None:
            latents, k_rope = cache.append(latents, k_rope)
        up = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        form = cheaper(q.shape[2], latents.shape[1], up) if self.form == "auto" else self.form
        dropout = self.dropout if self.training else 0.0
        context = FORMS[form](q, q_rope, latents, k_rope, up, self.attend, mask, self.scale, dropout)
        return self.o_proj(context.transpose(1, 2).flatten(2))

    def queries(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch heads seq channels"]:
        """Queries of each head, before rotation: channels without position, then those that turn."""
        rows = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def turn(
        self,
        q: Float[Tensor, "batch heads seq rotary"],
        k: Float[Tensor, "batch seq rotary"],
        cos: Float[Tensor, "#batch seq rotary"],
        sin: Float[Tensor, "#batch seq rotary"],
    ) -> tuple[Float[Tensor, "batch heads seq rotary"], Float[Tensor, "batch seq rotary"]]:
        """Queries and the key of all heads, rotated by the angles of the positions."""
        return rotate(self.paired(q), cos, sin), rotate(self.paired(k[:, None]), cos, sin)[:, 0]

    def paired(self, x: Float[Tensor, "batch heads seq rotary"]) -> Float[Tensor, "batch heads seq rotary"]:
        """The channels that turn together as halves: adjacent ones are stored so."""
        return x if self.pairing == "half" else x.unflatten(-1, (-1, 2)).mT.flatten(-2)
