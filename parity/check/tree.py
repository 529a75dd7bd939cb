"""Any arguments and any results, as a tree of tensors: lists, mappings, outputs of transformers, caches of every kind.

Nothing is known of their classes. An object is walked by its attributes, and copied by `deepcopy`, which keeps what is
one object in two places one object, so that a cache in a call stays the cache that the module writes to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

Path = tuple[Any, ...]
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type)
_OPAQUE = (nn.Module, torch.Generator)
CACHE = re.compile(r"Cache|State")
"""What the names of classes contain whose objects remember earlier tokens."""


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a node with their keys: indices, keys, or names of attributes."""
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)
    elif _is_object(node):
        yield from vars(node).items()


def _is_object(node: Any) -> bool:
    return hasattr(node, "__dict__") and not isinstance(node, (*_ATOMS, *_OPAQUE)) and not callable_or_config(node)


def callable_or_config(node: Any) -> bool:
    """Functions, and configurations, which hold no tensors and refer to much."""
    return hasattr(node, "__code__") or hasattr(node, "to_diff_dict")


def walk(node: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """Every tensor and every object of a tree, once each, in an order that depends on the tree's structure only."""
    seen = set() if seen is None else seen
    if isinstance(node, _ATOMS) or id(node) in seen:
        return
    seen.add(id(node))
    yield path, node
    if isinstance(node, Tensor):
        return
    for key, child in children(node):
        yield from walk(child, (*path, key), seen)


def tensors(node: Any) -> dict[Path, Tensor]:
    """The tensors of a tree by their paths."""
    return {path: each for path, each in walk(node) if isinstance(each, Tensor)}


def dtypes(node: Any) -> dict[Path, torch.dtype]:
    """The dtypes of the floating-point tensors of a tree by their paths."""
    return {path: tensor.dtype for path, tensor in tensors(node).items() if tensor.is_floating_point()}


def caches(node: Any) -> dict[Path, Any]:
    """The outermost objects of a tree that remember earlier tokens, by their paths."""
    found: dict[Path, Any] = {}
    for path, each in walk(node):
        inside = any(path[: len(outer)] == outer for outer in found)
        if is_cache(each) and not inside:
            found[path] = each
    return found


def is_cache(node: Any) -> bool:
    """Whether an object remembers earlier tokens, by the name of its class."""
    return _is_object(node) and CACHE.search(type(node).__name__) is not None and not isinstance(node, Mapping)


def converted(node: Any, convert: Callable[[Path, Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
    """A deep copy of a tree in which every tensor is replaced; modules stay what they are.

    Args:
        convert: makes the new tensor of a path and the old one.
        dtype: what objects that remember float32 as theirs remember afterwards.
    """
    memo: dict[int, Any] = {}
    for path, each in walk(node):
        if isinstance(each, Tensor):
            memo[id(each)] = convert(path, each)
        elif isinstance(each, _OPAQUE) or callable_or_config(each):
            memo[id(each)] = each
    copy = deepcopy(node, memo)
    if dtype is not None:
        for _, each in walk(copy):
            if _is_object(each):
                vars(each).update({name: dtype for name, value in vars(each).items() if value is torch.float32})
    return copy


def snapshot(node: Any) -> Any:
    """A deep copy whose tensors are detached; strides and shared storage are kept."""
    return converted(node, _detached())


def _detached() -> Callable[[Path, Tensor], Tensor]:
    """Copies tensors with the layout they have; those that share a storage go on to share one."""
    storages: dict[int, Any] = {}

    def copy(path: Path, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone(), storage
        fresh = storages[storage.data_ptr()][0]
        like = torch.empty(0, dtype=tensor.dtype)
        return like.set_(fresh, tensor.storage_offset(), tensor.shape, tensor.stride())

    return copy


def named(root: str, node: Any) -> dict[str, Tensor]:
    """The tensors of a result by readable names; what remembers earlier tokens is left out.

    A single tensor is called as the root; parts are `root[1]`, `root.logits`.
    """
    remembered = list(caches(node))
    found = {}
    for path, tensor in tensors(node).items():
        if not any(path[: len(outer)] == outer for outer in remembered):
            found[spelled(root, path)] = tensor
    return found


def spelled(root: str, path: Path) -> str:
    """A path as it would be written."""
    return root + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def remembered(node: Any) -> dict[str, Tensor]:
    """What caches hold, as the rest of the project calls it: `layer 0 keys`, `layer 0 memory keys`."""
    found: dict[str, Tensor] = {}
    for cache in caches(node).values():
        for path, tensor in tensors(cache).items():
            found.setdefault(_cache_name(path), tensor)
    return found


def _cache_name(path: Path) -> str:
    words: list[str] = []
    for key in path:
        if key == "layers":
            continue
        if key == "cross_attention_cache":
            words.append("memory")
        elif key != "self_attention_cache":
            words.append(f"layer {key}" if isinstance(key, int) and words[-1:] != ["layer"] else str(key))
    layer = [word for word in words if word.startswith("layer ")]
    return " ".join(layer + [word for word in words if word not in layer])
