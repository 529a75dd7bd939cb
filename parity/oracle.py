"""The float64 truth: the unmodified reference, lifted out of its float32 islands.

transformers asks for float32 by name inside norms, softmax, rotary tables and routers, so its own float64 run is only
good to 1e-7. `Lift` rewrites each such request to float64 while the reference runs. A correct port then agrees to
1e-15.

Rotary frequencies stay what they are, the float32-rounded buffer: they are part of the specification. The functions
that compute them again in a forward (dynamic NTK, LongRoPE) therefore run without the lift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity import reference


class Lift(TorchFunctionMode):
    """Rewrites every request for float32 to float64: `.float()`, `.to(float32)`, `dtype=float32`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if any(arg is torch.float32 for arg in args):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs) if kwargs else func(*args)


def _unlifted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


@contextmanager
def lifted() -> Iterator[None]:
    """Run the reference in float64 throughout."""
    with reference.frequency_functions(_unlifted), Lift():
        yield
