"""Mistakes that can be made in the reference itself, at the seams that its modules share by name.

They are what people get wrong in any attention: rotation, shared heads, scale, mask, positions; besides these the
epsilon of norms and the activation. Where the catalogue has the same mistake it has the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.check.seams import (
    Function,
    Given,
    Moment,
    Slip,
    Wrap,
    attributes,
    computed,
    forwards,
    functions,
    given,
    remasked,
    replaced,
)
from reimpl.rope import half_order

ROTATION = functions(r"apply_\w*rotary\w*", "cos", "sin")
HALF = functions("rotate_half")
REPEAT = functions("repeat_kv")
ATTENTION = functions("eager_attention_forward", "query", "key", "value", "attention_mask", "scaling")
ROTARY = forwards("Rotary", "position_ids")


# Rotation. What is rotated are the parameters beside the tables.

TABLES = ("cos", "sin")


def rotated_of(arguments: Given) -> list[str]:
    """The parameters that are rotated: queries, keys, or both."""
    return [
        name for name, value in arguments.items() if isinstance(value, Tensor) and name not in (*TABLES, "position_ids")
    ]


@dataclass(frozen=True)
class Pairing:
    """Which channels a function turns together: the first one and its partner; how many take part."""

    partner: int

    @property
    def adjacent(self) -> bool:
        return self.partner == 1

    @property
    def width(self) -> int | None:
        return None if self.adjacent else 2 * self.partner


def pairing_of(original: Function, arguments: Given) -> Pairing | None:
    """Found by turning the first channel by a right angle; None if it stays where it is."""
    x = arguments[rotated_of(arguments)[0]]
    first = torch.zeros_like(x)
    first[..., 0] = 1.0
    turned = {"cos": torch.zeros_like(arguments["cos"]), "sin": torch.ones_like(arguments["sin"])}
    found = original(arguments | dict.fromkeys(rotated_of(arguments), first) | turned)
    found = found[0] if isinstance(found, tuple) else found
    partner = int(found.flatten(0, -2)[0].abs().argmax())
    return Pairing(partner) if partner else None


def paired_otherwise(to_halves: bool) -> Wrap:
    """The other pairing: channels are brought into the order that the function turns, and back."""

    def compute(original: Function, arguments: Given) -> Any:
        names = rotated_of(arguments)
        pairing = pairing_of(original, arguments) if names else None
        width = arguments["cos"].shape[-1]
        if pairing is None or pairing.adjacent != to_halves:
            return original(arguments)
        width = pairing.width or min(width, arguments[names[0]].shape[-1])
        there, back = (interleaved, parted) if to_halves else (parted, interleaved)
        result = original(arguments | {name: there(arguments[name], width) for name in names})
        return _each(result, lambda x: back(x, width))

    return computed(compute)


def parted(x: Tensor, width: int) -> Tensor:
    """Of the first channels those with even numbers, then those with odd ones; the others stay."""
    return x[..., half_order(x.shape[-1], width)]


def interleaved(x: Tensor, width: int) -> Tensor:
    """The inverse of `parted`."""
    return x[..., half_order(x.shape[-1], width).argsort()]


def _each(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tuple(map(change, result)) if isinstance(result, tuple) else change(result)


def leaving(*numbers: int) -> Wrap:
    """Some of what is rotated, by its number, is left as it is."""

    def compute(original: Function, arguments: Given) -> Any:
        result, names = original(arguments), rotated_of(arguments)
        if not isinstance(result, tuple):
            return result
        return tuple(arguments[names[i]] if i in numbers else each for i, each in enumerate(result))

    return computed(compute)


def keys_the_wrong_way(original: Function, arguments: Given) -> Any:
    right, wrong = original(arguments), original(arguments | {"sin": -arguments["sin"]})
    return (right[0], wrong[1]) if isinstance(right, tuple) else right


def tables_for_adjacent(original: Function, arguments: Given) -> Any:
    pairing = pairing_of(original, arguments) if rotated_of(arguments) else None
    if pairing is None or pairing.adjacent or pairing.width != arguments["cos"].shape[-1]:
        return original(arguments)
    return original(arguments | {name: interleaved(arguments[name], 2 * pairing.partner) for name in TABLES})


def turned_pairs(original: Function, arguments: Given) -> Any:
    """Of adjacent pairs (a, b) the turned ones, (-b, a)."""
    (x,) = arguments.values()
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def without_sign(original: Function, arguments: Given) -> Any:
    return original(arguments) * original({name: torch.ones_like(x) for name, x in arguments.items()})


def rotation(name: str, change: Callable[[Given, Moment], Given]) -> Slip:
    return Slip(name, ROTATION, given(change))


def first_row_of_tables(arguments: Given, moment: Moment) -> Given:
    return {name: arguments[name][:1].expand_as(arguments[name]) for name in TABLES}


ROTATIONS = (
    Slip("rotates adjacent pairs where the reference rotates halves", ROTATION, paired_otherwise(to_halves=False)),
    Slip("rotates halves where the reference rotates adjacent pairs", ROTATION, paired_otherwise(to_halves=True)),
    Slip("turns adjacent pairs by tables that are laid out for halves", HALF, computed(turned_pairs)),
    Slip("lays the tables out for adjacent pairs, and rotates halves", ROTATION, computed(tables_for_adjacent)),
    Slip("adds the turned half where it should be subtracted", HALF, computed(without_sign)),
    Slip("leaves q unrotated", ROTATION, leaving(0)),
    Slip("leaves k unrotated", ROTATION, leaving(1)),
    Slip("rotates neither q nor k", ROTATION, leaving(0, 1)),
    Slip("rotates k the wrong way, and q the right way", ROTATION, computed(keys_the_wrong_way)),
    rotation("rotates the wrong way", lambda a, _: {"sin": -a["sin"]}),
    rotation("takes sines for cosines", lambda a, _: {"cos": a["sin"], "sin": a["cos"]}),
    rotation("uses the positions of the first row for all rows", first_row_of_tables),
)


# Positions. The tables are those that the whole model would compute then.


def positions(name: str, change: Callable[[Tensor, Moment], Tensor]) -> Slip:
    return Slip(name, ROTARY, given(lambda a, m: {"position_ids": change(a["position_ids"], m)}), tables=True)


def counted(first: int, positions: Tensor) -> Tensor:
    return (first + torch.arange(positions.shape[-1])).expand_as(positions)


POSITIONS = (
    positions("counts positions from 1", lambda p, m: p + 1),
    positions("decodes from position 0 again", lambda p, m: counted(0, p) if m.step else p),
    positions("decodes one position further on", lambda p, m: p + 1 if m.step else p),
    positions("decodes one position behind", lambda p, m: (p - 1).clamp(min=0) if m.step else p),
    positions("counts positions from 0 in every chunk", lambda p, m: counted(0, p)),
    positions("ignores the positions given", lambda p, m: counted(m.seen, p)),
)


# Heads.


def tiled(original: Function, arguments: Given) -> Tensor:
    x, count = arguments.values()
    return x.repeat(1, count, 1, 1)


def first_head(original: Function, arguments: Given) -> Tensor:
    x, count = arguments.values()
    return x[:, :1].expand(-1, x.shape[1] * count, -1, -1)


def joined(change: Callable[[Tensor], Tensor]) -> Wrap:
    """Heads are joined otherwise: `change` gets their contexts, [rows, tokens, heads, channels]."""

    def compute(original: Function, arguments: Given) -> Any:
        context, *rest = original(arguments)
        return (change(context).reshape(context.shape), *rest)

    return computed(compute)


def new_keys_only(arguments: Given, moment: Moment) -> Given:
    query, key, mask = (arguments[name] for name in ("query", "key", "attention_mask"))
    if query.shape[-2] >= key.shape[-2]:
        return {}
    new = {name: arguments[name][..., -query.shape[-2] :, :] for name in ("key", "value")}
    return new | ({} if mask is None else {"attention_mask": mask[..., -query.shape[-2] :]})


HEADS = (
    Slip("tiles key/value heads where the reference repeats each", REPEAT, computed(tiled)),
    Slip("lets all heads read the first key/value head", REPEAT, computed(first_head)),
    Slip("mixes heads and channels when heads are joined", ATTENTION, joined(lambda x: x.mT)),
    Slip("mixes heads and tokens when heads are joined", ATTENTION, joined(lambda x: x.transpose(1, 2))),
    Slip("attends to the new keys only", ATTENTION, given(new_keys_only)),
)


# Scale.


def scaled(name: str, scale: Callable[[float, int, Any], float]) -> Slip:
    """Scores are scaled by another factor, made of the right one, of head_dim and of the configuration."""

    def change(arguments: Given, moment: Moment) -> Given:
        width, config = arguments["query"].shape[-1], getattr(arguments.get("module"), "config", None)
        right = arguments["scaling"] if arguments["scaling"] is not None else width**-0.5
        return {"scaling": scale(right, width, config)}

    return Slip(name, ATTENTION, given(change))


def by_hidden_size(right: float, width: int, config: Any) -> float:
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return right if not hidden or not heads else (hidden / heads) ** -0.5


def uncapped(arguments: Given, moment: Moment) -> Given:
    return {"softcap": None} if "softcap" in arguments else {}


SCALES = (
    scaled("does not scale the scores", lambda right, width, config: 1.0),
    scaled("scales the scores twice", lambda right, width, config: right * right),
    scaled("scales by the fourth root of head_dim for the second", lambda right, width, config: right**0.5),
    scaled("divides scores by head_dim for its root", lambda right, width, config: 1 / width),
    scaled("scales by the root of head_dim, whatever the configuration says", lambda right, width, config: width**-0.5),
    scaled("scales by hidden_size / heads for head_dim", by_hidden_size),
    Slip("leaves out the soft cap of the scores", ATTENTION, given(uncapped)),
)


# Masks, boolean [rows or 1, heads or 1, queries, keys]; the keys end with those of the queries.


def causal(allowed: Tensor, ahead: int = 0) -> Tensor:
    """What lies no further ahead of a query than so many keys."""
    queries, keys = allowed.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + ahead)


def readable(allowed: Tensor) -> Tensor:
    """The keys that some query may see, for all queries: no padding."""
    return allowed.any(-2, keepdim=True)


def has_window(allowed: Tensor) -> bool:
    return bool((causal(allowed) & readable(allowed) & ~allowed).any())


def without_window(allowed: Tensor, moment: Moment) -> Tensor:
    return causal(allowed) & readable(allowed)


def longer_window(allowed: Tensor, moment: Moment) -> Tensor:
    """Every query sees the key before those that it may see, too."""
    before = torch.cat((allowed[..., 1:], torch.zeros_like(allowed[..., :1])), -1) & causal(allowed)
    return allowed | (before & readable(allowed)) if has_window(allowed) else allowed


def shorter_window(allowed: Tensor, moment: Moment) -> Tensor:
    """Those furthest away are lost, where queries see no further."""
    if not has_window(allowed):
        return allowed
    queries, keys = allowed.shape[-2:]
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return allowed & (distance < distance.where(allowed, 0).max())


def one_after(allowed: Tensor, moment: Moment) -> Tensor:
    return allowed | (causal(allowed, ahead=1) & ~causal(allowed) & readable(allowed))


def itself(allowed: Tensor) -> Tensor:
    queries, keys = allowed.shape[-2:]
    return torch.eye(keys, dtype=torch.bool)[-queries:]


def from_the_top(allowed: Tensor, moment: Moment) -> Tensor:
    return torch.ones(allowed.shape[-2:], dtype=torch.bool).tril() & readable(allowed)


def any_row(allowed: Tensor) -> Tensor:
    """What is allowed in any row: that of one without padding."""
    return allowed.any(0, keepdim=True).expand_as(allowed)


def with_cache(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Moment], Tensor]:
    """Only where there are keys of earlier tokens."""
    return lambda allowed, moment: change(allowed) if allowed.shape[-1] > allowed.shape[-2] else allowed


def masks(name: str, change: Callable[[Tensor, Moment], Tensor | None]) -> Slip:
    return Slip(name, ATTENTION, remasked(change))


def mildly_low(arguments: Given, moment: Moment) -> Given:
    mask = arguments["attention_mask"]
    return {} if mask is None or mask.dtype is torch.bool else {"attention_mask": mask.clamp(min=-10.0)}


MASKS = (
    masks("masks nothing", lambda allowed, _: None),
    masks("lets tokens see those after them", lambda allowed, _: allowed | (~causal(allowed) & readable(allowed))),
    masks("lets tokens see the one after them", one_after),
    masks("lets no token see itself", lambda allowed, _: allowed & ~itself(allowed)),
    masks("lets no token of an encoder see those after it", lambda allowed, _: allowed & causal(allowed)),
    masks("ignores padding", lambda allowed, _: any_row(allowed)),
    masks("forgets the padding in decoding", with_cache(any_row)),
    masks("ignores the window", without_window),
    masks("lets the window reach one token further", longer_window),
    masks("lets the window reach one token less far", shorter_window),
    masks("aligns the causal mask top-left", from_the_top),
    masks("lets a chunk after others see all of itself", with_cache(lambda a: readable(a).expand_as(a))),
    Slip("lowers the scores of what is masked by too little", ATTENTION, given(mildly_low)),
)


# Norms and activations, as parts of modules keep them.

EPSILON = attributes("variance_epsilon", "eps", "epsilon")
ACTIVATION = attributes("act_fn", "act", "activation_fn", "activation", "intermediate_act_fn")


class Activation(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def activated(function: Callable[[Tensor], Tensor]) -> Wrap:
    def other(right: Any) -> Any:
        return Activation(function) if isinstance(right, nn.Module) else function if callable(right) else right

    return replaced(other)


def epsilon(value: float) -> Wrap:
    return replaced(lambda right: value if isinstance(right, float) else right)


PARTS = (
    *(
        Slip(f"takes {value:g} for the epsilon of the norms", EPSILON, epsilon(value))
        for value in (1e-5, 1e-6, 1e-8, 1e-12)
    ),
    Slip("ignores the epsilon of the norms", EPSILON, epsilon(0.0)),
    Slip("computes the exact GELU", ACTIVATION, activated(nn.functional.gelu)),
    Slip("computes GELU by tanh", ACTIVATION, activated(partial(nn.functional.gelu, approximate="tanh"))),
    Slip("computes the quick GELU", ACTIVATION, activated(lambda x: x * (1.702 * x).sigmoid())),
    Slip("takes SiLU for the activation", ACTIVATION, activated(nn.functional.silu)),
    Slip("takes ReLU for the activation", ACTIVATION, activated(nn.functional.relu)),
    Slip("leaves out the activation", ACTIVATION, activated(lambda x: x)),
)

SLIPS = (*ROTATIONS, *POSITIONS, *HEADS, *SCALES, *MASKS, *PARTS)
