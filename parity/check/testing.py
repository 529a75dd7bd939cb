"""Tests of a layer in its own repository: `test_x = parity.against("llama:LlamaAttention").check(MyLlamaAttention)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")
PROPERTIES = ("forward", "gradients")


@dataclass(frozen=True)
class Against:
    """A reference that layers are held against.

    Attributes:
        reference: `model_type:Class`, a model type, or a checkpoint's directory.
        settings: the other fields of `parity.check.session.Options`.
    """

    reference: str
    settings: dict[str, Any] = field(default_factory=dict)

    def check(self, candidate: Any, *, adapter: Any = None, weights: Any = None) -> Callable[..., None]:
        """A test function, with one case for every property and dtype.

        Args:
            candidate: a class, a factory, or where it stands, `path/file.py:Name`.
            adapter: a function `call(module, recorded)` or a `parity.Adapter`.
            weights: rules, or where they stand.
        """
        import pytest

        cases = [pytest.param(prop, name, id=f"{prop}-{name}") for prop in PROPERTIES for name in self.dtypes]

        @pytest.mark.parity
        @pytest.mark.parametrize(("parity_property", "parity_dtype"), cases)
        def test(parity_property: str, parity_dtype: str) -> None:
            try:
                self.hold(candidate, parity_property, parity_dtype, adapter=adapter, weights=weights)
            except AssertionError as error:
                pytest.fail(str(error), pytrace=False)

        test.__doc__ = f"{getattr(candidate, '__name__', candidate)} is the same function as {self.reference}."
        return test

    @property
    def dtypes(self) -> Sequence[str]:
        return self.settings.get("dtypes", DTYPES)

    def hold(
        self,
        candidate: Any,
        prop: str | None = None,
        dtype: str | None = None,
        *,
        adapter: Any = None,
        weights: Any = None,
    ) -> None:
        """Hold a candidate against the reference, in all properties and dtypes unless one is given.

        Raises:
            AssertionError: with the mismatch, as the command line prints it.
            InputError: if either side cannot be found or built.
        """
        from parity.check.command import checked, mismatch_text, verdict
        from parity.check.session import Options
        from parity.scenario import DTYPE_NAMES

        settings = {name: value for name, value in self.settings.items() if name != "dtypes"}
        options = Options(candidate, self.reference, adapter, weights, **settings)
        names = [dtype] if dtype else self.dtypes
        options = replace(options, dtypes=tuple(DTYPE_NAMES[name] for name in names))
        options = replace(options, properties=(prop,)) if prop else options
        result = checked(options)
        if not result.holds:
            raise AssertionError("\n\n".join(map(mismatch_text, result.mismatches)) or verdict(result))


def against(reference: str, **settings: Any) -> Against:
    """The reference to hold layers against.

    Args:
        reference: `model_type:Class`, a model type, or a checkpoint's directory.
        settings: `dtypes`, `configurations`, `seed`, `shared`, `limits`: fields of `parity.check.session.Options`.
    """
    return Against(reference, settings)
