"""Is your Transformer layer the same function as the class in transformers?

`parity.against(...)` makes tests of a layer, `parity.Adapter` is subclassed where it is called in its own way. They are
imported when they are asked for, so that `import parity` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.check.adapter import Adapter, Recorded
    from parity.check.testing import against

__all__ = ["Adapter", "Recorded", "against"]
_HOMES = {"Adapter": "parity.check.adapter", "Recorded": "parity.check.adapter", "against": "parity.check.testing"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
