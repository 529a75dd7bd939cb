"""The user's side: a class, a factory or an adapter, found by what is written on the command line, and built.

Whatever is wrong with it ends in a `CandidateError` that says what to do: the code is not ours, so anything may happen.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from parity.check.adapter import Adapter, Constructed, DropIn, Function
from parity.check.ours import Ours, is_ours
from parity.errors import InputError


class CandidateError(InputError):
    """A candidate that cannot be found, built or called."""


def load(place: str, what: str = "candidate") -> Any:
    """What stands at `path/file.py:Name` or `package.module:Name`.

    Without a name it is the only module class that is defined there.

    Raises:
        CandidateError: naming the file or the module, and the names nearest to the one that is not there.
    """
    source, _, name = place.rpartition(":") if ":" in place else (place, "", "")
    module = _module(source, what)
    own = _own_classes(module)
    if not name:
        if len(own) != 1:
            raise CandidateError(
                f"{what} {place}: say which of {len(own)} classes is meant, such as {source}:{own[0]}"
                if own
                else f"{what} {place}: defines no module"
            )
        name = own[0]
    found: Any = module
    for part in name.split("."):
        if not with_message(partial(hasattr, found, part), f"{what} {place}: {part} cannot be looked up"):
            raise CandidateError(f"{what} {place}: {source} has no {part!r}{_nearest(part, own, vars(module))}")
        found = getattr(found, part)
    return found


def _nearest(name: str, own: list[str], known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, [each for each in known if not each.startswith("_")], n=1)
    listed = f"; its modules are {', '.join(own)}" if own else "; it defines no module"
    return f"; did you mean {close[0]!r}?" if close else listed


def _own_classes(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]


def _module(source: str, what: str) -> ModuleType:
    if source.endswith(".py") or "/" in source:
        return _from_file(Path(source), what)
    if not source:
        raise CandidateError(f"{what}: name it as path/file.py:Name or package.module:Name")
    _importable(Path.cwd())
    try:
        spec = importlib.util.find_spec(source)
    except (ImportError, ValueError, AttributeError) as error:
        raise CandidateError(f"{what} {source}: no such module ({error})") from error
    if spec is None:
        hint = f"; for a file write {source}.py:Name" if Path(f"{source}.py").is_file() else ""
        raise CandidateError(f"{what} {source}: no such module can be imported from here{hint}")
    return _imported(source, source, what)


def _from_file(path: Path, what: str) -> ModuleType:
    """A file as a module; one in a package under its full name, so that its relative imports work."""
    if not path.is_file():
        beside = (
            sorted(each.name for each in path.parent.glob("*.py") if each.is_file()) if path.parent.is_dir() else []
        )
        close = get_close_matches(path.name, beside, n=1)
        hint = f"; did you mean {path.parent / close[0]}?" if close else ""
        kind = "is a directory" if path.is_dir() else "no such file"
        raise CandidateError(f"{what} {path}: {kind}{hint}")
    root, names = path.resolve().parent, [path.stem]
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    _importable(root)
    name = ".".join(names)
    there = sys.modules.get(name)
    if there is not None and Path(getattr(there, "__file__", None) or "").resolve() == path.resolve():
        return there
    if len(names) > 1:
        return _imported(name, str(path), what)
    spec = importlib.util.spec_from_file_location(name if there is None else f"{name}_candidate", path.resolve())
    if spec is None or spec.loader is None:
        raise CandidateError(f"{what} {path}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with_message(lambda: spec.loader.exec_module(module), f"{what} {path} cannot be imported")
    return module


def _importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _imported(name: str, shown: str, what: str) -> ModuleType:
    return with_message(lambda: importlib.import_module(name), f"{what} {shown} cannot be imported")


def with_message(run: Any, failing: str, *passed: type[BaseException]) -> Any:
    """Run what is the user's; whatever it raises becomes one line that names the place.

    Args:
        passed: what is of one line already.

    Raises:
        CandidateError: with the exception and its last frame in the user's own files.
    """
    try:
        return run()
    except passed:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise CandidateError(f"{failing}: {said(error)}") from error


def said(error: BaseException) -> str:
    """An exception in one line, with its last frame outside of libraries."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # of an odd class
        text = ""
    if len(text) > LONGEST:
        text = text[:LONGEST] + " ..."
    return f"{type(error).__name__}{f': {text}' if text else ''}{_where(error)}"


LONGEST = 400
OURS = Path(__file__).resolve().parents[1]
LIBRARIES = ("site-packages", "dist-packages", "<", str(Path(inspect.__file__).parent))


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})" if error.filename else ""
    return f" ({_short(own[-1].filename)}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def _is_library(filename: str) -> bool:
    """Whether a file is none of the user's; layers beside our own tests are."""
    within = Path(filename).is_relative_to(OURS) and not Path(filename).is_relative_to(OURS / "meta")
    return within or any(library in filename for library in LIBRARIES)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def adapter_of(target: Any, adapter: Any) -> Adapter:
    """How a candidate is built and called.

    Args:
        target: a module class, a factory, a module, or an `Adapter` that builds one.
        adapter: an `Adapter` class or instance, a function `call(module, recorded)`, or None for a drop-in.

    Raises:
        CandidateError: if either is something else.
    """
    if adapter is None and inspect.isclass(target) and issubclass(target, Adapter):
        adapter = target
    if adapter is None and isinstance(target, Adapter):
        return target
    if adapter is None and is_ours(target):
        return Ours()
    if adapter is None:
        return DropIn()
    if inspect.isclass(adapter) and issubclass(adapter, Adapter):
        return with_message(adapter, f"adapter {adapter.__name__} cannot be made")
    if isinstance(adapter, Adapter):
        return adapter
    if callable(adapter) and not inspect.isclass(adapter):
        return Function(adapter)
    raise CandidateError(f"adapter {adapter!r}: should be a function call(module, recorded) or a parity.Adapter")


def build(adapter: Adapter, target: Any, constructed: Constructed) -> nn.Module:
    """The user's module, from what the reference is constructed with.

    Raises:
        CandidateError: if it takes other arguments, raises, or is no module.
    """
    name = getattr(target, "__name__", type(target).__name__)
    if not callable(target):
        raise CandidateError(
            f"candidate {name}: is a {type(target).__name__}, but should be a module class or a factory"
        )
    if isinstance(adapter, DropIn):
        _check_signature(target, name, constructed.args, constructed.kwargs)
    with defaults_kept():
        module = with_message(lambda: adapter.build(target, constructed), f"candidate {name} cannot be built")
    if not isinstance(module, nn.Module):
        raise CandidateError(f"candidate {name}: gives a {type(module).__name__}, but should give an nn.Module")
    with_message(lambda: _readable(module), f"candidate {name} cannot be read")
    if meta := [key for key, value in tensors(module) if value.is_meta]:
        raise CandidateError(
            f"candidate {name}: {meta[0]} and {len(meta) - 1} more tensors are on the meta device and hold no numbers;"
            " build it on the CPU (to_empty(device='cpu') before it is returned)"
        )
    return module


@contextmanager
def defaults_kept() -> Iterator[None]:
    """What is set for all of torch, its dtype and its device, is what it was once the context ends."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


def _readable(module: nn.Module) -> None:
    """That parameters and state can be read; what the first call initialises has none yet.

    Raises:
        ValueError: naming a parameter that is not there yet.
    """
    if lazy := [name for name, parameter in module.named_parameters() if isinstance(parameter, UninitializedParameter)]:
        raise ValueError(f"{lazy[0]} is made by the first call only; call it once before it is returned")
    module.state_dict()


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a module, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_signature(target: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([type(arg).__name__ if not isinstance(arg, int | float | str) else repr(arg) for arg in args])
        named = ", ".join(
            f"{key}={value!r}" if isinstance(value, int | float | str) else key for key, value in kwargs.items()
        )
        raise CandidateError(
            f"candidate {name}{signature} cannot be constructed as the reference is, with"
            f" ({', '.join(filter(None, (given, named)))}): {error}; write an adapter and give it with --adapter:\n\n"
            + skeleton(name)
        ) from error


def skeleton(name: str) -> str:
    """An adapter to fill in."""
    return f"""import parity

class Adapt{name}(parity.Adapter):
    def build(self, cls, constructed):
        return cls(hidden_size=constructed.config.hidden_size)  # what {name} wants, from the reference's configuration

    def call(self, module, recorded):
        output = module(recorded.x)  # and recorded["attention_mask"], recorded.may_attend, recorded.cos, ...
        return output, None  # and its cache after the call: (keys, values), or None if it keeps none
"""
