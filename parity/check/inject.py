"""Mistakes made from outside in the user's own layer: in its weights, inputs, configuration and cache.

Each changes what the layer computes without its knowledge, as a bad loader, a wrong mask or a wrong field would. A
check that does not see one would not see it in real life either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.check import replay, tree
from parity.check.guest import Guest
from parity.check.record import Call
from parity.check.session import Session, Site
from parity.check.verdict import judge_forward
from parity.compare import Record, Unequal


@dataclass(frozen=True)
class Injected:
    """A mistake, what it is made in, and the scenarios that show it."""

    name: str
    kind: str
    by: tuple[str, ...]


def injected(session: Session, site: Site) -> Iterator[Injected]:
    """Make every mistake that this layer has a place for, and see which scenarios show it, in float64."""
    for name, kind, make in (*_weights(site), *_inputs(site), *_config(session, site)):
        try:
            guest, turn = make()
        except Exception:
            continue  # not a layer that can be built so
        changed, caught = _seen(site, guest, turn)
        if changed:  # a layer that never reads a field cannot be wrong in it
            yield Injected(name, kind, caught)


Turn = Callable[[Call], Call]
Make = Callable[[], tuple[Guest, Turn]]
Change = Callable[[str, Tensor], Tensor | None]
Entry = tuple[str, str, Make]


def _seen(site: Site, guest: Guest, turn: Turn) -> tuple[bool, tuple[str, ...]]:
    """Whether the layer computes anything else than without the mistake, and the scenarios that show it."""
    changed, caught = False, []
    for scenario, reason in site.scenarios.items():
        calls = site.built.calls(scenario) if reason is None else []
        changed = changed or any(_changes(site, guest, call, turn) for call in calls)
        if changed and any(_differs(site, guest, call, turn) for call in calls):
            caught.append(scenario)
    return changed, tuple(caught)


def _changes(site: Site, guest: Guest, call: Call, turn: Turn) -> bool:
    truth = site.built.truth(call)
    right, _ = site.guest("f64").forward(call, truth)
    try:
        wrong, _ = guest.forward(turn(call), truth)
    except Unequal:
        return True
    return not all(map(replay.same, right.values, wrong.values))


def _differs(site: Site, guest: Guest, call: Call, turn: Turn) -> bool:
    try:
        judgements = judge_forward(site.built, _Turned(guest, turn(call)), call, "f64")
    except Unequal:
        return True
    return not all(judgement.holds for judgement in judgements)


class _Turned:
    """A guest that is given another call than the one it is judged by."""

    def __init__(self, guest: Guest, call: Call) -> None:
        self._guest, self._call = guest, call

    def forward(self, call: Call, truth: Record) -> tuple[Record, list[str]]:
        return self._guest.forward(self._call, truth)


def _same(call: Call) -> Call:
    return call


def _weights(site: Site) -> Iterator[Entry]:
    """Every parameter zero, one unit in bfloat16 off, transposed where it is square, its rows rolled by one."""
    for name, parameter in site.guest("f64").parameters.items():
        yield f"{name} is not loaded: zero", "weights", _with(site, name, torch.zeros_like)
        yield (
            f"{name} is loaded in bfloat16 and a rounding off",
            "weights",
            _with(site, name, lambda w: w * (1 + 2**-7)),
        )
        if len(parameter) > 1:
            yield f"{name} has its rows in another order", "weights", _with(site, name, lambda w: w.roll(1, 0))
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
            yield f"{name} is transposed", "weights", _with(site, name, lambda w: w.mT)


def _with(site: Site, name: str, change: Callable[[Tensor], Tensor]) -> Make:
    def make() -> tuple[Guest, Turn]:
        guest = copy.copy(site.guest("f64"))
        guest.module = copy.deepcopy(guest.module)
        with torch.no_grad():
            parameter = dict(guest.module.named_parameters())[name]
            parameter.copy_(change(parameter.detach().clone()))
        return guest, _same

    return make


def _inputs(site: Site) -> Iterator[Entry]:
    """Masks that are left out or inverted, tables of the next position, an empty cache, rows exchanged."""
    changes: dict[str, Change] = {
        "the mask hides nothing": lambda name, t: torch.zeros_like(t) if "mask" in name and t.ndim == 4 else None,
        "the mask hides nothing of padding": lambda name, t: (
            t[:1].expand_as(t) if "mask" in name and len(t) > 1 else None
        ),
        "positions are one too large": lambda name, t: t + 1 if name == "position_ids" else None,
        "rotary tables are those of the token before": lambda name, t: (
            t.roll(1, 1) if name.startswith("position_embeddings") else None
        ),
        "cosine is taken for sine": lambda name, t: (
            (1 - t * t).clamp(min=0).sqrt() if name == "position_embeddings[1]" else None
        ),
        "the input is rounded to bfloat16 once more": lambda name, t: (
            (t * 1.001).to(torch.bfloat16).to(t.dtype) if name == "hidden_states" else None
        ),
    }
    for name, change in changes.items():
        if any(_changed(call, change) is not None for call in _calls(site)):
            yield name, "inputs", partial(_turning, site, change)
    if any(call.step for call in _calls(site)):
        yield "the cache forgets its oldest token", "cache", lambda: (site.guest("f64"), _forgetful)
        yield "the cache is not read", "cache", lambda: (site.guest("f64"), _uncached)


def _turning(site: Site, change: Change) -> tuple[Guest, Turn]:
    return site.guest("f64"), lambda call: _changed(call, change) or call


def _calls(site: Site) -> list[Call]:
    return [call for name, reason in site.scenarios.items() if reason is None for call in site.built.calls(name)]


def _changed(call: Call, change: Change) -> Call | None:
    """A call with some of its arguments changed; None if none of them is."""
    hit = False

    def convert(path: tree.Path, tensor: Tensor) -> Tensor:
        nonlocal hit
        found = change(replay.argument_name(path), tensor)
        hit = hit or (found is not None and not replay.same(found, tensor))
        return tensor.clone() if found is None else found.clone()

    args, kwargs = tree.converted(call.given, convert)
    return _call(call, args, kwargs) if hit else None


def _call(call: Call, args: Any, kwargs: Any) -> Call:
    return replace(call, args=args, kwargs=kwargs)


def _forgetful(call: Call) -> Call:
    """The same call, the first cached token gone bad."""
    return _cached(call, lambda t: torch.cat([torch.zeros_like(t[..., :1, :]), t[..., 1:, :]], -2))


def _uncached(call: Call) -> Call:
    return _cached(call, torch.zeros_like)


def _cached(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    held = list(tree.caches(call.given))

    def convert(path: tree.Path, tensor: Tensor) -> Tensor:
        inside = any(path[: len(outer)] == outer for outer in held) and tensor.ndim == 4
        return change(tensor) if inside else tensor.clone()

    return _call(call, *tree.converted(call.given, convert))


FIELDS = {
    "rms_norm_eps": lambda v: v * 10, "layer_norm_eps": lambda v: v * 10, "layer_norm_epsilon": lambda v: v * 10,
    "hidden_act": lambda v: "relu" if v != "relu" else "gelu", "hidden_activation": lambda v: "relu",
    "num_experts_per_tok": lambda v: max(1, v - 1), "sliding_window": lambda v: v and v + 1,
    "rope_theta": lambda v: v * 2, "routed_scaling_factor": lambda v: v * 2, "norm_topk_prob": lambda v: not v,
    "attn_logit_softcapping": lambda v: v and v * 2, "query_pre_attn_scalar": lambda v: v * 2,
}  # fmt: skip


def _config(session: Session, site: Site) -> Iterator[Entry]:
    """One field of the configuration that the layer is built from has another value."""
    for field, change in FIELDS.items():
        value = getattr(site.built.config, field, None)
        if value is not None and change(value) != value:
            yield (
                f"{field} is {change(value)} instead of {value}",
                "configuration",
                _misbuilt(session, site, field, change),
            )


def _misbuilt(session: Session, site: Site, field: str, change: Callable[[Any], Any]) -> Make:
    def make() -> tuple[Guest, Turn]:
        guest = copy.copy(site.guest("f64"))
        guest.module = site.rebuilt(lambda config: setattr(config, field, change(getattr(config, field))))
        return guest, _same

    return make
