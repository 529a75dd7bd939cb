"""torch as the reference: how the layers of `torch.nn` are built and called. They keep no cache.

They can be told in several ways who sees whom, and the tokens may be counted by the first axis or the second. Neither
changes what is computed, so a configuration's `calls` say which way is taken:

    batch_first     the layout of inputs and outputs
    masking         how masks are given: `float` and `boolean`, one for all, per row and head; `split`, a causal one and
                    one for padding, both boolean; `split_float`, the same as numbers; `hint`, that and `is_causal`
    fast            whether the fused kernels for evaluation may be taken
    added           whether numbers are added to the scores
    weights         whether the weights of attention are asked for, which are then formed one by one
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from parity.case import Bias, Case, Step, Tables
from parity.family import Family, Kind, Layer
from parity.reference import Reference, cast
from parity.scenario import ScenarioError
from parity.tiny import draw
from reimpl.weights import slots

PARTS: Mapping[str, tuple[str, ...]] = {"_ff_block": ("linear1", "linear2")}
"""The modules whose weights a part of a layer reads, by the method that computes it."""
BACKENDS = {"math": [SDPBackend.MATH], "fused": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}


def version() -> str:
    """The installed reference, as it is named in reports."""
    return f"torch {torch.__version__}"


class TorchConfig(SimpleNamespace):
    """The arguments of `torch.nn.Transformer` by name, and `calls`."""

    def to_dict(self) -> dict[str, Any]:
        """What is computed, without the manner of calling."""
        return {name: value for name, value in vars(self).items() if name != "calls"}


def make_config(fields: Mapping[str, Any]) -> TorchConfig:
    """The configuration of the fields, which stay untouched."""
    return TorchConfig(**deepcopy(dict(fields)))


class Part(nn.Module):
    """A part of a layer that is a method there, with the weights it reads."""

    def __init__(self, layer: nn.Module, method: str) -> None:
        super().__init__()
        for name in PARTS[method]:
            self.add_module(name, getattr(layer, name))
        self._whole = [layer.eval()]  # in a list, so that its other weights are none of this module's
        self._method = method

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self._whole[0], self._method)(x)


class TorchReference(Reference):
    """One layer of torch under one configuration in one dtype."""

    def __init__(self, family: Family, layer: Layer, config: TorchConfig, dtype: torch.dtype) -> None:
        self.family, self.layer, self.dtype = family, layer, dtype
        self.config, self._rotary = deepcopy(config), None
        self.backend = ""
        self.use(family.implementations[0])
        self.module: Any = cast(self._build(layer.reference, layer.arguments), dtype).eval()
        self.parameters = dict(self.module.named_parameters())
        self.slots, self.place, self.rules = slots(self.module), layer.at, ()

    @property
    def home(self) -> Any:
        """The module in which the layers are defined."""
        return nn

    def _build(self, name: str, arguments: Any) -> nn.Module:
        name, _, method = name.partition(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nested tensors are no use here
            module = getattr(nn, name)(**arguments(self.config))
        return Part(module, method) if method else module

    def use(self, implementation: Mapping[str, Any]) -> None:
        """Choose the kernel of the scaled dot product."""
        self.backend = implementation["sdpa"]

    def new_cache(self) -> None:
        """There is none."""

    def tables(self, case: Case) -> Tables | None:
        """The numbers that are added to the scores of all rows alike, drawn, in this side's dtype."""
        if not self.config.calls.get("added") or self.layer.kind is not Kind.ATTENTION:
            return None
        rows, length = case.positions.shape
        numbers = draw.normal((1, self.config.nhead, length, length), case.scenario.seed, "added to scores")
        return Bias(draw.bfloat16(numbers).to(self.dtype).expand(rows, -1, -1, -1))

    def __call__(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Any = None
    ) -> dict[str, Tensor]:
        """Run one pass over hidden states, [rows, length, width]."""
        args, named = self.arguments(case, step, x, tables)
        with self._path():
            return self.output(self.module(*args, **named))

    @contextmanager
    def _path(self) -> Iterator[None]:
        """Let torch take the path that the configuration names: a mode like the truth's keeps it off the fast one."""
        fast, before = bool(self.config.calls.get("fast")), torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            stack.enter_context(sdpa_kernel(BACKENDS[self.backend]))
            torch.backends.mha.set_fastpath_enabled(fast)
            stack.callback(torch.backends.mha.set_fastpath_enabled, before)
            if fast and not torch.is_grad_enabled():
                stack.enter_context(torch._C.DisableTorchFunction())
            yield

    def output(self, returned: Any) -> dict[str, Tensor]:
        """What a forward returned, by name."""
        output = returned[0] if isinstance(returned, tuple) else returned
        return {"output": self._turned(output)}

    def _turned(self, x: Tensor) -> Tensor:
        """Between our layout, rows first, and the one in which torch is called."""
        return x if self.layer.kind is Kind.POINTWISE or self.config.calls["batch_first"] else x.transpose(0, 1)

    def arguments(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What torch's forward is called with.

        Raises:
            ScenarioError: for more than one chunk.
        """
        if self.layer.kind is Kind.POINTWISE:
            return (x,), {}
        if step.stop - step.start != case.scenario.length:
            raise ScenarioError(f"{self.layer.reference} of torch keeps no cache: give all tokens in one chunk")
        x, memory = self._turned(x), case.memories(self.dtype, step)
        named, name = self._own_masks(case, tables), self.layer.reference
        if memory is None:
            attends = name == "MultiheadAttention"
            return ((x, x, x) if attends else (x,)), self._accepted(named)
        memory = self._turned(memory)
        if self.layer.kind is Kind.CROSS:
            return (x, memory, memory), self._accepted(_renamed(self._memory_masks(case, x), "attn_mask", ""))
        named |= _renamed(self._memory_masks(case, x), "memory_mask", "memory_")
        if name == "Transformer":
            return (memory, x), self._accepted(named | _renamed(self._memory_masks(case, memory), "src_mask", "src_"))
        return (x, memory), self._accepted(named)

    def _accepted(self, named: Mapping[str, Any]) -> dict[str, Any]:
        code = type(self.module).forward.__code__
        offered = {**named, "need_weights": bool(self.config.calls.get("weights"))}
        return {name: value for name, value in offered.items() if name in code.co_varnames[: code.co_argcount]}

    def _own_masks(self, case: Case, tables: Tables | None) -> dict[str, Any]:
        """Masks of a sequence that attends to itself, under all names that they have."""
        masking, allowed = self.config.calls["masking"], case.may_attend
        mask, padding, hint = None, None, False
        if isinstance(tables, Bias):
            mask = self._added(self._per_head(allowed, case)) + tables.bias.flatten(0, 1)
        elif masking in ("float", "boolean") or self._leaves_empty_rows(case):
            mask = self._told(self._per_head(allowed, case), numbers=masking == "float")
        else:
            numbers, length = masking == "split_float", case.scenario.length
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            mask = self._told(causal, numbers) if case.causal else None
            padding = None if case.valid is None else self._told(case.valid, numbers)
            hint = masking == "hint" and case.causal
        masks = {"attn_mask": mask, "mask": mask, "src_mask": mask, "tgt_mask": mask}
        paddings = {f"{of}key_padding_mask": padding for of in ("", "src_", "tgt_")}
        return masks | paddings | {"is_causal": hint, "tgt_is_causal": hint}

    def _memory_masks(self, case: Case, queries: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens of the memory are seen: by each query, or which are padding."""
        valid, masking = case.memory_valid, self.config.calls["masking"]
        if valid is None:
            return None, None
        if masking not in ("float", "boolean"):
            return None, self._told(valid, numbers=masking == "split_float")
        length = queries.shape[1 if self.config.calls["batch_first"] else 0]
        allowed = valid[:, None, None].expand(-1, -1, length, -1)
        return self._told(self._per_head(allowed, case), numbers=masking == "float"), None

    def _leaves_empty_rows(self, case: Case) -> bool:
        """Whether a query would see no key if padding were told apart from the rest: the gap encoder-nan."""
        if case.document is not None:
            return True
        return case.causal and case.valid is not None and not bool(case.valid[:, 0].all())

    def _per_head(self, allowed: Tensor, case: Case) -> Tensor:
        """[rows or 1, 1, queries, keys] as torch wants it, [rows * heads, queries, keys]."""
        return allowed.expand(case.scenario.rows, self.config.nhead, -1, -1).flatten(0, 1)

    def _told(self, allowed: Tensor, numbers: bool) -> Tensor:
        """Who may be seen, as torch is told: True where not, or what is added to the scores."""
        return self._added(allowed) if numbers else ~allowed

    def _added(self, allowed: Tensor) -> Tensor:
        return torch.zeros(allowed.shape, dtype=self.dtype).masked_fill(~allowed, -torch.inf)


def _renamed(masks: tuple[Tensor | None, Tensor | None], mask: str, of: str) -> dict[str, Tensor | None]:
    return {mask: masks[0], f"{of}key_padding_mask": masks[1]}
