"""The candidate in a live tiny model, in the place of the class: logits, generation, a training step, saving, loading.

Both models run in float64, lifted, so that what differs is a mistake and not rounding.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parity.check import drive, tree
from parity.check.adapter import Recorded
from parity.check.candidate import said
from parity.check.guest import Guest
from parity.check.record import parameter_names
from parity.check.result import Row, Where
from parity.check.session import Session, Site
from parity.check.subject import Built
from parity.check.weights import back
from parity.compare import Judgement, Quantity, Record, Unequal, judge
from parity.oracle import lifted

F64 = torch.float64
TOKENS, NEW, BEAMS, RATE = 9, 8, 3, 0.1


class Seat(nn.Module):
    """The candidate where the reference's module was: its parameters under their own names, called by its adapter."""

    def __init__(self, guest: Guest, replaced: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = (
            guest.module._parameters,
            guest.module._buffers,
            guest.module._modules,
        )
        object.__setattr__(self, "guest", guest)
        object.__setattr__(self, "names", parameter_names(replaced))
        object.__setattr__(self, "tuple_of", _length_of_result(replaced))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["guest"].module, name)

    def train(self, mode: bool = True) -> Seat:
        self.guest.module.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        guest = self.guest
        held = next(iter(tree.caches((args, kwargs)).values()), None)
        recorded = Recorded(args, kwargs, self.names, guest.config, guest.layer_idx, 0, guest.dtype, held, {})
        before = recorded.past
        output, cache = guest.adapter.call(guest.module, recorded)
        if held is not None and cache is not None and not tree.is_cache(cache):
            _store(held, list(tree.tensors(cache).values()), before, guest.layer_idx or 0)
        if self.tuple_of and isinstance(output, Tensor):
            return (output, *[None] * (self.tuple_of - 1))
        return output[0] if not self.tuple_of and isinstance(output, tuple) else output


def _length_of_result(module: nn.Module) -> int:
    """Of how many parts what a module returns consists; 0 if it is no tuple. Noted when it last ran."""
    return getattr(module, "_parity_parts", 0)


def _store(cache: Any, held: list[Tensor], before: list[tuple[Tensor, Tensor]], layer: int) -> None:
    """Put what an adapter's own cache has more than before into the model's cache."""
    if not held:
        return
    seen = before[0][0].shape[-2] if before else 0
    cache.update(held[0][..., seen:, :], held[1][..., seen:, :], layer)


def swapped_rows(session: Session, site: Site) -> Iterator[Row]:
    """One row for everything that a live model does."""
    built = site.built
    theirs = _prepared(copy.deepcopy(built.whole_model(F64)))
    ids = drive.ids(theirs.config, 2, TOKENS, session.options.seed, "swap")
    given = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if built.subject.task == "seq2seq" else {})
    _note_results(theirs, built, given)
    ours, guests = _with_guests(session, site, theirs)
    generates = built.subject.task != "masked" and hasattr(theirs, "generate")
    steps: dict[str, Callable[[], list[Judgement]]] = {
        "swap logits": lambda: _logits(theirs, ours, given, cached=built.subject.task == "causal"),
        "swap greedy": lambda: _generated(theirs, ours, ids, 1) if generates else [],
        "swap beams": lambda: _generated(theirs, ours, ids, BEAMS) if generates else [],
        "swap training": lambda: _trained(theirs, ours, guests, given),
        "swap saving": lambda: _saved(theirs, ours, guests, given),
    }
    for name, run in steps.items():
        row = Row(name, "f64")
        where = Where(site.number, str(built.point), name.removeprefix("swap "), 0)
        try:
            with lifted():
                judgements = run()
        except Exception as error:
            row.add(where, f"the model with the candidate in it raises {said(error)}")
        else:
            if not judgements:
                session.notes[f"{name} is left out: the reference generates no text"] = None
                continue
            row.add(where, judgements)
        yield row


def _prepared(model: nn.Module) -> nn.Module:
    """Without dropout, whose random numbers no two implementations draw alike."""
    for part in [*model.modules(), getattr(model, "config", None)]:
        for name, value in list(vars(part).items()) if part is not None else ():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model.eval()


def _note_results(model: nn.Module, built: Built, given: dict[str, Tensor]) -> None:
    """Note on every module of the class of how many parts its result consists."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        vars(module)["_parity_parts"] = len(output) if type(output) is tuple else 0

    kind = type(model.get_submodule(built.path))
    handles = [part.register_forward_hook(note) for part in model.modules() if type(part) is kind]
    with torch.no_grad(), lifted():
        model(**given)
    for handle in handles:
        handle.remove()


def _with_guests(session: Session, site: Site, theirs: nn.Module) -> tuple[nn.Module, dict[str, Guest]]:
    """A copy of the model with the candidate in the place of every module of the class."""
    kind = type(theirs.get_submodule(site.built.path))
    paths = [path for path, part in theirs.named_modules() if type(part) is kind]
    ours, guests = copy.deepcopy(theirs), {}
    for path in paths:
        there = site if path == site.built.path else Site(session, site.number, _elsewhere(site.built, path))
        guests[path] = guest = there.guest("f64")
        seat = Seat(guest, theirs.get_submodule(path))
        if not path:
            return seat.eval(), guests
        ours.set_submodule(path, seat.eval())
    return ours, guests


def _elsewhere(built: Built, path: str) -> Built:
    return Built(built.subject, built.point, copy.deepcopy(built.model), path, built.whole)


def _record(verdict: str, values: dict[str, Tensor]) -> Record:
    floats = {name: value.detach() for name, value in values.items() if value.is_floating_point()}
    return Record([Quantity(name, verdict) for name in floats], list(floats.values()), [None] * len(floats))


def _judged(verdict: str, theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> list[Judgement]:
    wanted = _record(verdict, theirs)
    found = _record(verdict, {name: value for name, value in ours.items() if name in theirs})
    return judge(wanted, found, [], F64, "f64")


def _logits(theirs: Any, ours: Any, given: dict[str, Tensor], cached: bool) -> list[Judgement]:
    with torch.no_grad():
        whole = [{"logits": _first(model(**given))} for model in (theirs, ours)]
        judgements = _judged("output", *whole)
        if cached:
            judgements += _judged("output", *(_in_steps(model, given["input_ids"]) for model in (theirs, ours)))
    return judgements


def _in_steps(model: Any, ids: Tensor) -> dict[str, Tensor]:
    prefill = model(input_ids=ids[:, :-1], use_cache=True)
    remembered = drive.carried(prefill, _accepted(model))
    return {"logits of a cached step": _first(model(input_ids=ids[:, -1:], use_cache=True, **remembered))}


def _accepted(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _first(output: Any) -> Tensor:
    """Logits, or whatever comes first."""
    return next(iter(tree.named("output", getattr(output, "logits", output)).values()))


def _generated(theirs: Any, ours: Any, ids: Tensor, beams: int) -> list[Judgement]:
    """How many tokens differ, of which none may."""
    if not hasattr(ours, "generate"):
        raise Unequal("the candidate is the whole model and has no generate()")
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    one, other = (model.generate(ids, attention_mask=mask, **settings) for model in (theirs, ours))
    count = float((one != other).sum()) if one.shape == other.shape else float(one.numel())
    name = "tokens of greedy text" if beams == 1 else f"tokens of {beams} beams"
    return [Judgement(Quantity(name, "output"), "f64", count, count, 0.0, 0.0)]


def _trained(theirs: Any, ours: Any, guests: dict[str, Guest], given: dict[str, Tensor]) -> list[Judgement]:
    """Loss and all gradients in training mode, and the weights after a step against them; on copies."""
    results = []
    for model in (theirs, ours):
        model.train()
        output = _first(model(**given))
        targets = drive.ids(theirs.config, output.shape[0], output.shape[1], 1, "targets")
        loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten() % output.shape[-1])
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        gradients = dict(zip(parameters, found, strict=True))
        after = {name: parameters[name].detach() - RATE * gradient for name, gradient in gradients.items()}
        model.eval()
        guests_of = guests if model is ours else {}
        results.append((loss, _named(gradients, guests_of), _named(after, guests_of)))
    (loss, gradients, after), (our_loss, our_gradients, our_after) = results
    return [
        *_judged("output", {"loss": loss[None]}, {"loss": our_loss[None]}),
        *_judged("gradient", _titled("gradient of", gradients), _titled("gradient of", our_gradients)),
        *_judged("gradient", _titled("after a step,", after), _titled("after a step,", our_after)),
    ]


def _titled(title: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{title} {name}": value for name, value in values.items()}


def _named(values: dict[str, Tensor], guests: dict[str, Guest]) -> dict[str, Tensor]:
    """Values of parameters by the reference's names."""
    for path, guest in guests.items():
        prefix = f"{path}." if path else ""
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        rest = {name: value for name, value in values.items() if not name.startswith(prefix)}
        values = rest | {prefix + name: value for name, value in back(own, guest.rules).items()}
    return values


def _saved(theirs: Any, ours: Any, guests: dict[str, Guest], given: dict[str, Tensor]) -> list[Judgement]:
    """Saved with the candidate in it: read by the reference's class where names are the same, else by itself."""
    if not hasattr(ours, "save_pretrained"):
        raise Unequal("the candidate is the whole model and has no save_pretrained()")
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        ours.save_pretrained(directory)
        if any(guest.rules for guest in guests.values()):
            again = copy.deepcopy(ours)
            again.load_state_dict(load_file(Path(directory, "model.safetensors")), strict=False)
        else:
            again = copy.deepcopy(theirs)
            again.load_state_dict(type(theirs).from_pretrained(directory).state_dict())
        return _judged(
            "output",
            {"logits after loading": _first(theirs(**given))},
            {"logits after loading": _first(again(**given))},
        )
