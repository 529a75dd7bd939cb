"""The reference side. The only file that knows how transformers is called; differences between its versions live here.

| what | 4.57 | 5.0 to 5.16 | 5.24 |
|---|---|---|---|
| name of the cache argument | `past_key_values` | `past_key_values` | `cache` |
| name of the cache in a model's output | `past_key_values` | `past_key_values` | `cache` |
| `cache_position` | wanted | gone since 5.4 | gone |
| names and shapes in memory | as on disk | its own, see `disk_rules` | its own |
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache as memoize
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from parity.case import OF_MEMORY, Bias, Case, Rotary, Step, Tables
from parity.family import Family, Kind, Layer
from parity.states import States, state_contents
from reimpl.weights import Rule, Same, Stacked, slots

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


def version() -> str:
    """The installed reference, as it is named in reports."""
    return f"transformers {transformers.__version__}"


def make_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The Hugging Face configuration of the fields, `model_type` among them; the caller's fields stay untouched."""
    return AutoConfig.for_model(**deepcopy(dict(fields)))


def modeling(model_type: str) -> Any:
    """The module in which transformers keeps the layers of a model type."""
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def layer_class(model_type: str, name: str) -> type[nn.Module]:
    """A class of the reference by its name."""
    return getattr(modeling(model_type), name)


def balance_loss(model_type: str) -> Callable[[tuple[Tensor, ...], int, Tensor | None], Tensor] | None:
    """The reference's load-balancing loss of router logits, for so many chosen experts, over the valid tokens."""
    loss = getattr(modeling(model_type), "load_balancing_loss_func", None)
    if loss is None:
        return None
    return lambda logits, chosen, valid: loss(
        logits, logits[0].shape[-1], chosen, None if valid is None else valid.long()
    )


@contextmanager
def frequency_functions(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap the functions that compute rotary frequencies, as long as the context lasts."""
    original = dict(ROPE_INIT_FUNCTIONS)
    ROPE_INIT_FUNCTIONS.update({name: wrap(function) for name, function in original.items()})
    try:
        yield
    finally:
        ROPE_INIT_FUNCTIONS.update(original)


def cast(module: nn.Module, dtype: torch.dtype, kept: Sequence[str] = ()) -> nn.Module:
    """Cast the parameters in place and leave the buffers, as loading a checkpoint in a dtype does (gap half-buffers).

    Those whose names end in one of `kept` stay in at least float32.
    """
    for name, parameter in module.named_parameters():
        wide = any(f".{name}".endswith(f".{ending}") for ending in kept)
        parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32) if wide else dtype)
    return module


def fixed_tables(module: nn.Module) -> frozenset[str]:
    """The names of parameters that follow from their shape, as Marian's sinusoids, now with their numbers.

    No checkpoint has them, and a module by itself has them uninitialised.
    """
    found = set()
    for path, part in module.named_modules():
        if hasattr(part, "create_weight"):
            part.weight.data = part.create_weight().to(part.weight.dtype)
            found.add(f"{path}.weight")
    return frozenset(found)


@memoize
def kept_in_float32(model_type: str) -> tuple[str, ...]:
    """How the names of parameters end that stay in float32 when a checkpoint is loaded in half precision."""
    return tuple(
        ending
        for cls in vars(modeling(model_type)).values()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel)
        for ending in sorted(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
    )


@memoize
def _conversions(model_type: str) -> tuple[Any, ...]:
    """What the reference does to names and shapes when it reads a checkpoint; nothing before version 5."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return ()
    return tuple(get_checkpoint_conversion_mapping(model_type) or ())


def in_memory(model_type: str, name: str) -> str:
    """What a module is called in the reference, by its name on disk."""
    for conversion in _conversions(model_type):
        if not hasattr(conversion, "operations"):
            for disk, memory in zip(conversion.source_patterns, conversion.target_patterns, strict=True):
                name = name.replace(disk, memory)
    return name


def _on_disk(model_type: str, name: str) -> str:
    for conversion in _conversions(model_type):
        if not hasattr(conversion, "operations"):
            for disk, memory in zip(conversion.source_patterns, conversion.target_patterns, strict=True):
                name = name.replace(memory, disk)
    return name


def disk_rules(model_type: str, tensors: Mapping[str, Tensor]) -> tuple[Rule, ...]:
    """How tensors on disk become those of the reference, by their full names in memory.

    Read from the reference's own table, which merges one tensor per expert on disk, gate above up, into one.
    """
    merged = [conversion for conversion in _conversions(model_type) if hasattr(conversion, "operations")]
    rules: list[Rule] = []
    for name, tensor in tensors.items():
        for conversion in merged:
            if name.endswith(conversion.target_patterns[0]):
                stem = name.removesuffix(conversion.target_patterns[0])
                parts = [_on_disk(model_type, stem + source) for source in conversion.source_patterns]
                experts = (tuple(part.replace("*", str(expert)) for part in parts) for expert in range(len(tensor)))
                rules.append(Stacked(tuple(experts), name))
                break
        else:
            if (disk := _on_disk(model_type, name)) != name:
                rules.append(Same(disk, name))
    return tuple(rules)


@memoize
def _accepted(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


class Reference:
    """One reference layer under one configuration in one dtype.

    Building does not disturb the configuration it is given: transformers writes into it, so every module has a copy.
    """

    def __init__(self, family: Family, layer: Layer, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self.family, self.layer, self.dtype = family, layer, dtype
        self.config = deepcopy(config)
        self.use(family.implementations[0])
        self.use(family.exact if dtype is torch.float64 else {})
        kept = kept_in_float32(family.model_type)
        self.module: Any = cast(self._build(layer.reference, layer.arguments), dtype, kept).eval()
        tables = fixed_tables(self.module)
        self.parameters = {name: each for name, each in self.module.named_parameters() if name not in tables}
        self.slots = {name: slot for name, slot in slots(self.module).items() if name not in tables}
        self.place = in_memory(family.model_type, layer.at)
        self.rules = disk_rules(family.model_type, {self.place + name: slot for name, slot in self.slots.items()})
        self._rotary = self._build(family.rotary, None) if family.rotary and layer.kind is Kind.ATTENTION else None

    def _build(self, name: str, arguments: Callable[[Any], Mapping[str, Any]] | None) -> nn.Module:
        cls = layer_class(self.family.model_type, name)
        if arguments is not None:
            return cls(**arguments(self.config))
        wanted = inspect.signature(cls.__init__).parameters
        return cls(self.config, layer_idx=self.layer.index) if "layer_idx" in wanted else cls(self.config)

    @property
    def home(self) -> Any:
        """The module in which the layers are defined."""
        return modeling(self.family.model_type)

    def use(self, implementation: Mapping[str, Any]) -> None:
        """Choose how the reference computes; it reads these fields at every call."""
        for name, value in implementation.items():
            setattr(self.config, name, value)

    def can(self, implementation: Mapping[str, str]) -> bool:
        """Whether the reference computes so here: `grouped_mm` knows no float64, and wants rows of whole 16 bytes."""
        if implementation.get("_experts_implementation") != "grouped_mm":
            return True
        rows = [tensor.stride(-2) * tensor.element_size() for tensor in self.parameters.values() if tensor.ndim == 3]
        return self.dtype is not torch.float64 and all(size % 16 == 0 for size in rows)

    def loaded(self) -> None:
        """Say that the weights are as on disk: RWKV halves some in its first pass, in place, and remembers it."""
        for part in self.module.modules():
            if hasattr(part, "layers_are_rescaled"):
                part.layers_are_rescaled = False

    def new_cache(self) -> Any:
        """An empty cache, as the reference makes it for itself; where it attends to a memory, one for that too."""
        if "state" in _accepted(type(self.module).forward):
            return States(self.config, self.dtype)
        if self.layer.must_remember or getattr(self.config, "add_cross_attention", False):
            return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        return DynamicCache(config=self.config)

    def cache_contents(self, cache: Any) -> list[tuple[str, Tensor]]:
        """What a cache holds, by name: keys and values of every layer, [rows, kv_heads, kept tokens, head_dim]."""
        if not self.layer.recurrent:
            return cache_contents(cache)
        only = None if self.layer.kind is Kind.MODEL else self.layer.index
        return state_contents(cache, self.layer.states, only)

    def tokens_in(self, cache: Any) -> int:
        """How many tokens a cache has seen."""
        return cache.get_seq_length(self.layer.index)

    def crop(self, cache: Any, tokens: int) -> None:
        """Take the last tokens from a cache."""
        if tokens:
            cache.crop(-tokens)

    def reorder(self, cache: Any, index: Tensor) -> None:
        """Row i of a cache continues what row index[i] was."""
        cache.reorder_cache(index)

    def reset(self, cache: Any) -> None:
        """Let a cache forget everything."""
        cache.reset()

    def rotary_modules(self) -> list[nn.Module]:
        """The modules that make rotary tables, which may remember how far they have been asked."""
        found = [module for module in self.module.modules() if "Rotary" in type(module).__name__]
        return found if self._rotary is None else [*found, self._rotary]

    def tables(self, case: Case) -> Tables | None:
        """Rotary tables of all positions, or what ALiBi adds to the scores of all keys, in this side's dtype."""
        if self._rotary is not None:
            return Rotary(*self._rotary(case.inputs(self.dtype), case.positions))
        if self.family.alibi is not None and self.layer.kind is Kind.ATTENTION:
            valid = torch.ones_like(case.positions) if case.valid is None else case.valid.long()
            make = getattr(modeling(self.family.model_type), self.family.alibi)
            bias = make(valid, self.config.num_attention_heads, self.dtype)
            return Bias(bias.unflatten(0, (len(valid), -1)))
        return None

    def __call__(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Any = None
    ) -> dict[str, Tensor]:
        """Run one step on `x`: hidden states, or ids for a whole model; [rows, queries(, width)]."""
        args, named = self.arguments(case, step, x, tables, cache)
        returned = self.module(*args, **named)
        if isinstance(cache, States):
            cache.take(returned)
        return self.output(returned)

    def output(self, returned: Any) -> dict[str, Tensor]:
        """What a forward returned, by name."""
        if self.layer.kind is Kind.ROTARY:
            return dict(zip(Kind.ROTARY.results, returned, strict=True))
        pooled = getattr(returned, "pooler_output", None)
        return {"output": _first(returned)} | ({} if pooled is None else {"pooled": pooled})

    def arguments(
        self, case: Case, step: Step, x: Tensor, tables: Tables | None = None, cache: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the reference's forward is called with in one step, under the names of the installed version."""
        kind, x = self.layer.kind, x.contiguous()  # some layers take views of their input
        if kind is Kind.ROTARY:
            return (x, case.positions[:, step.start : step.stop]), {}
        offered: dict[str, Any] = {"residual": torch.zeros_like(x)}  # which Bloom's parts add to their result
        if kind is Kind.RECURRENT:
            offered |= self._recurrent(case, step)
        elif kind not in (Kind.POINTWISE, Kind.MIXER, Kind.IMAGE):
            offered |= self._model(case, step, x) if kind.reads_ids else self._attention(case, step, tables)
        offered |= {"state": cache.given(len(x))} if isinstance(cache, States) else dict.fromkeys(CACHE_NAMES, cache)
        if self.layer.recurrent:
            offered["use_cache"] = cache is not None  # a state that is carried is written in place
        accepted = _accepted(type(self.module).forward)
        named = {name: value for name, value in offered.items() if name in accepted}
        return () if kind.reads_ids else (x,), named

    def router_logits(self, case: Case) -> tuple[Tensor, ...]:
        """What the routers of a whole model give to all experts, layer by layer, [tokens, experts].

        The model without its head is asked: with it a loss is computed, which fails where no layer has experts (gap
        qwen3-moe-dense).
        """
        _, named = self.arguments(case, Step(0, 0, case.scenario.length), case.ids)
        return self.module.base_model(**named, output_router_logits=True).router_logits or ()

    def generate(self, case: Case, new_tokens: int, use_cache: bool, eos: int | None) -> Tensor:
        """Greedy generation, [rows, prompt + at most new_tokens]; finished rows are filled with the padding token."""
        mask = torch.ones_like(case.ids) if case.valid is None else case.valid.long()
        padding = getattr(self.config, "pad_token_id", None)
        self.module.generation_config.eos_token_id = eos  # as an argument, None would mean the configuration's own
        return self.module.generate(
            case.ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=use_cache,
            pad_token_id=eos if padding is None else padding,
            **self._memory(case, case.steps[0]),
        )

    def _attention(self, case: Case, step: Step, tables: Tables | None) -> dict[str, Any]:
        return {
            "position_embeddings": tables.at(step) if isinstance(tables, Rotary) else None,
            "alibi": tables.at(step).flatten(0, 1) if isinstance(tables, Bias) else None,
            "attention_mask": case.added_mask(step, self.dtype),
            "position_ids": case.positions[:, step.start : step.stop],
            "cache_position": torch.arange(step.start, step.stop),
        } | self._memory(case, step, added=True)

    def _recurrent(self, case: Case, step: Step) -> dict[str, Any]:
        valid = None if case.valid is None else case.valid[:, step.start : step.stop].long()
        return {"attention_mask": valid}

    def _model(self, case: Case, step: Step, x: Tensor) -> dict[str, Any]:
        span = slice(step.start, step.stop)
        seen = slice(step.start if self.layer.recurrent else 0, step.stop)  # gap mamba-mask
        valid = None if case.valid is None else case.valid[:, seen].long()
        counted = case.default_positions and self.layer.kind is Kind.MODEL
        return {
            "inputs_embeds" if x.is_floating_point() else "input_ids": x,
            "attention_mask": valid,
            "position_ids": None if counted else case.positions[:, span],
            "token_type_ids": None if case.types is None else case.types[:, span],
            "use_cache": case.cached,
        } | self._memory(case, step)

    def _memory(self, case: Case, step: Step, added: bool = False) -> dict[str, Any]:
        """An encoder's memory, with its mask as it is added to scores, or as a model takes it; nothing without one."""
        if case.memory is None:
            return {}
        mask = None if case.memory_valid is None else case.memory_valid.long()
        return {
            "encoder_hidden_states": case.memories(self.dtype, step),
            "encoder_attention_mask": case.added_memory_mask(self.dtype) if added else mask,
        }


class Loaded(Reference):
    """A reference whose module was read from a checkpoint, with that module's own configuration."""

    def __init__(self, family: Family, layer: Layer, module: nn.Module, dtype: torch.dtype) -> None:
        self.family, self.layer, self.dtype = family, layer, dtype
        self.module, self.config, self._rotary = module, module.config, None
        if dtype is torch.float64:
            for part in (self.config, *module.modules()):
                vars(part).update({name: value for name, value in family.exact.items() if name in vars(part)})
        self.parameters = dict(module.named_parameters())


def load(family: Family, layer: Layer, directory: Path, dtype: torch.dtype, gguf_file: str | None = None) -> nn.Module:
    """The reference's own reading of a checkpoint: from this directory alone, and never from a pickle.

    What a checkpoint says about sampling is left out, as it would change greedy decoding too.
    """
    logging.disable_progress_bar()
    cls: Any = layer_class(family.model_type, layer.reference)
    module = cls.from_pretrained(
        directory, dtype=dtype, gguf_file=gguf_file, local_files_only=True, use_safetensors=True
    )
    module.generation_config = GenerationConfig()
    return module.eval()


def tokenizer(directory: Path, gguf_file: str | None = None) -> Any:
    """The tokenizer that lies in a directory, or in a GGUF file there."""
    return AutoTokenizer.from_pretrained(directory, gguf_file=gguf_file, local_files_only=True)


def _first(output: Any) -> Tensor:
    """The tensor that matters in what a layer returned: itself, the first of a tuple, logits or hidden states."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Sequence):
        return output[0]
    return output.logits if "logits" in output else output.last_hidden_state


def cache_contents(cache: Any) -> list[tuple[str, Tensor]]:
    """What a cache holds, by name: keys and values of every layer, [rows, kv_heads, kept tokens, head_dim]."""
    contents = []
    for of, part in cache_parts(cache).items():
        for index, layer in enumerate(part.layers):
            if layer.is_initialized:
                contents += [(f"layer {index} {of}keys", layer.keys), (f"layer {index} {of}values", layer.values)]
    return contents


def cache_parts(cache: Any) -> dict[str, Any]:
    """The plain caches that a cache consists of, by what their contents are called: one of the memory's tokens, too."""
    if isinstance(cache, EncoderDecoderCache):
        return {"": cache.self_attention_cache, OF_MEMORY: cache.cross_attention_cache}
    return {} if cache is None or isinstance(cache, States) else {"": cache}
