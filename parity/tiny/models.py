"""Tiny models of any model type that the installed transformers knows: built in any dtype, and written to disk."""

from __future__ import annotations

import importlib
import inspect
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from parity.tiny import draw, shrink
from parity.tiny.shrink import Unshrinkable, brief

TASKS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "causal": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
}
"""The heads that a model can have, in the order in which they are preferred where a model type has several."""

GIVEN = "_given_to_constructor"
MOST_PARAMETERS = 3_000_000


@dataclass(frozen=True)
class Point:
    """A point of a configuration space.

    Attributes:
        changes: the fields that differ from the plain tiny configuration.
        place: which of the modules of a class is meant, in their order in the model, counted round: layers differ.
    """

    changes: tuple[tuple[str, Any], ...] = ()
    place: int = 0

    def __hash__(self) -> int:
        return hash(str(self))  # values may be mappings

    def __str__(self) -> str:
        changes = ", ".join(f"{name}={value}" for name, value in self.changes) or "plain"
        return f"{changes}, place {self.place}" if self.place else changes


PLAIN = Point()


def model_types(task: str) -> list[str]:
    """The model types that have a head for a task."""
    return sorted(TASKS[task][1])


def tasks(model_type: str) -> list[str]:
    """The tasks that a model type has heads for."""
    return [task for task, (_, names) in TASKS.items() if model_type in names]


def modeling(model_type: str) -> Any:
    """The module in which transformers keeps the layers of a model type.

    Raises:
        Unshrinkable: if there is none, or it lacks something to be imported.
    """
    config = type(shrink.default(model_type))
    name = config.__module__.replace(".configuration_", ".modeling_")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unshrinkable(f"{model_type}: {brief(error)}") from error


def is_whole(model_type: str, name: str) -> bool:
    """Whether a class is a model that is built from a configuration alone."""
    found = getattr(modeling(model_type), name, None)
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


@cache
def plain(model_type: str, task: str) -> tuple[str, Any]:
    """The first recipe whose configuration builds a small model that runs, with a cache if any does.

    Raises:
        Unshrinkable: if none does, with the reason of the first.
    """
    reasons: list[str] = []
    for cached in (True, False):
        for recipe, config in shrink.candidates(model_type, {"is_decoder": task == "causal"}):
            try:
                check(config, task, cached)
            except Exception as error:
                reasons.append(brief(error))
            else:
                return recipe.name, config
    raise Unshrinkable(f"{model_type}: {reasons[0]}")


def check(config: Any, task: str, cached: bool = False) -> None:
    """Build a model and run a few tokens.

    Raises:
        Unshrinkable: if it is too large; or whatever it raises.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config, task, torch.float32).parameters())
    if size > MOST_PARAMETERS:
        raise Unshrinkable(f"the smallest model has {size:,} parameters")
    small = build(config, task, torch.float32)
    tokens = 6 + draw.tokens((2, 7), 40, 0, "tokens")
    more = {"decoder_input_ids": tokens, "use_cache": cached} if task == "seq2seq" else {"use_cache": cached}
    accepted = inspect.signature(small.forward).parameters
    with torch.no_grad():
        small(tokens, **{name: value for name, value in more.items() if name in accepted})


def config(model_type: str, task: str, point: Point = PLAIN) -> Any:
    """The tiny configuration at a point.

    Raises:
        Unshrinkable: if the class refuses it.
    """
    _, found = plain(model_type, task)
    if not point.changes:
        return deepcopy(found)
    try:
        return shrink.changed(found, dict(point.changes))
    except Exception as error:
        raise Unshrinkable(f"{model_type} with {point}: {brief(error)}") from error


def model(model_type: str, task: str, point: Point, dtype: torch.dtype, cls: str | None = None) -> nn.Module:
    """A tiny model in a dtype, in evaluation mode, computing eagerly; its weights are not set.

    Args:
        cls: a class of the model type to be built instead of the one that the task has.

    Raises:
        Unshrinkable: with the reason.
    """
    chosen = config(model_type, task, point)
    with constructors_recorded({model_type, *nested_types(chosen)}):
        return build(chosen, task, dtype, None if cls is None else getattr(modeling(model_type), cls))


def build(config: Any, task: str, dtype: torch.dtype, cls: Any = None) -> nn.Module:
    """A model as loading a checkpoint in that dtype builds it: what is kept in float32 there stays in float32."""
    torch.manual_seed(0)  # buffers that are drawn shall be the same in each dtype
    config = deepcopy(config)
    part = own_config(config, task)
    if part is not config:
        cls, config = getattr(transformers, TASKS[task][1][config.model_type]), part
    make = TASKS[task][0].from_config if cls is None else cls._from_config
    built = make(config, dtype=dtype, attn_implementation="eager")
    use(built, "eager")
    kept = set(getattr(built, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        kept |= set(getattr(built, "_keep_in_fp32_modules", None) or ())
    for name, parameter in built.named_parameters():
        if dtype in (torch.float16, torch.bfloat16) and any(
            word in name.split(".") or name.endswith(word) for word in kept
        ):
            parameter.data = parameter.data.float()
    return built.eval()


def own_config(config: Any, task: str) -> Any:
    """The configuration that the class of a task is made from: the whole one, or a part of it."""
    name = TASKS[task][1].get(config.model_type, ())
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    nested = (getattr(config, each, None) for each in getattr(config, "sub_configs", {}))
    return next((each for each in nested if isinstance(each, wanted)), config)


def of_checkpoint(directory: Path, task: str, dtype: torch.dtype) -> nn.Module:
    """The model of a checkpoint's configuration in a dtype; its weights are not set.

    Raises:
        Unshrinkable: naming the directory and what is wrong.
    """
    try:
        found = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        return build(found, task, dtype)
    except Exception as error:
        raise Unshrinkable(f"{directory}: no model can be built from its configuration: {brief(error)}") from error


def stored(directory: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a checkpoint by the names of a model's state, float64, rounded to what bfloat16 represents.

    Raises:
        Unshrinkable: naming the directory and what is wrong, such as tensors that are missing.
    """
    transformers.logging.disable_progress_bar()
    try:
        loaded, report = type(model).from_pretrained(  # type: ignore[attr-defined]
            directory, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        raise Unshrinkable(f"{directory}: its weights cannot be read: {brief(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise Unshrinkable(f"{directory}: the checkpoint lacks {', '.join(missing[:3])}")
    state = loaded.state_dict()
    return {
        name: draw.bfloat16(value).double() if value.is_floating_point() else value for name, value in state.items()
    }


def encoded(states: Tensor) -> Any:
    """What an encoder returned, [rows, tokens, width], as a model takes it in later steps."""
    return transformers.modeling_outputs.MoeModelOutputWithPast(last_hidden_state=states)


def configs(module: nn.Module) -> list[Any]:
    """Every configuration that some part of a module refers to."""
    found: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, transformers.PreTrainedConfig):
                found.setdefault(id(value), value)
                for name in getattr(value, "sub_configs", {}):
                    nested = getattr(value, name, None)
                    if isinstance(nested, transformers.PreTrainedConfig):
                        found.setdefault(id(nested), nested)
    return list(found.values())


def use(module: nn.Module, implementation: str) -> None:
    """Choose how attention is computed; experts are computed one by one."""
    for each in configs(module):
        each._attn_implementation = implementation
        each._experts_implementation = "eager"


def supports(model: nn.Module, implementation: str) -> bool:
    """Whether a model can compute its attention so."""
    return implementation == "eager" or bool(getattr(model, f"_supports_{implementation}", False))


def nested_types(config: Any) -> set[str]:
    """The model types of the configurations inside one."""
    names = getattr(config, "sub_configs", {})
    inside = [getattr(config, name, None) for name in names]
    return {each.model_type for each in inside if each is not None and each.model_type}


@contextmanager
def quietly() -> Iterator[None]:
    """Keep to themselves what transformers says of odd sizes and missing kernels, as long as the context lasts."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


@contextmanager
def constructors_recorded(model_types: set[str]) -> Iterator[None]:
    """Leave with every module that is built what its class was constructed with, as long as the context lasts."""
    classes = [cls for model_type in model_types for cls in _own_classes(model_type)]
    originals = {cls: vars(cls)["__init__"] for cls in classes}
    for cls, original in originals.items():
        cls.__init__ = _recording(original)
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original


def _own_classes(model_type: str) -> list[Any]:
    try:
        module = modeling(model_type)
    except Unshrinkable:
        return []
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return [cls for cls in classes if cls.__module__ == module.__name__ and "__init__" in vars(cls)]


def _recording(original: Any) -> Any:
    @wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault(GIVEN, (args, kwargs))
        original(self, *args, **kwargs)

    return construct


def on_disk(model: nn.Module, path: str) -> dict[str, Tensor]:
    """A module's tensors by their names on disk, float64, without the prefix that they share.

    Names and shapes on disk are the same in every version of transformers, those in memory are not. Which are the
    module's is found by marking its tensors and writing the model once more.
    """
    marked = deepcopy(model)
    with torch.no_grad():
        for value in marked.get_submodule(path).state_dict(keep_vars=True).values():
            if value.is_floating_point():
                value.fill_(torch.nan)
    ours = [name for name, value in written(marked).items() if value.is_floating_point() and value.isnan().any()]
    values = written(model)
    return {name.removeprefix(_prefix(ours, path)): values[name].double() for name in ours}


def written(model: Any) -> dict[str, Tensor]:
    """What a model writes to disk."""
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        files = sorted(Path(directory).glob("*.safetensors"))
        return {name: value for file in files for name, value in load_file(file).items()}


def _prefix(names: list[str], path: str) -> str:
    """Where the module is on disk: at its path, or at the longest that all its names begin with."""
    if not path or not names:
        return ""
    if all(name.startswith(f"{path}.") for name in names):
        return f"{path}."
    parts = [name.split(".")[:-1] for name in names]
    shared = next((i for i, each in enumerate(zip(*parts, strict=False)) if len(set(each)) > 1), min(map(len, parts)))
    return ".".join([*parts[0][:shared], ""])


@cache
def all_model_types() -> list[str]:
    """Every model type of the installed transformers."""
    return sorted(transformers.CONFIG_MAPPING)


def class_names(model_type: str) -> list[str]:
    """The modules that transformers defines for a model type."""
    module = modeling(model_type)
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return sorted(cls.__name__ for cls in classes if cls.__module__ == module.__name__)
