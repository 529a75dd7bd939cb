"""The pytest plugin: an option, a marker and a fixture for tests of layers; nothing else is imported until one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from parity.check.testing import Against

DTYPES = ("float64", "float32", "bfloat16", "float16")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--parity-dtype", action="append", choices=DTYPES, help="only this dtype (repeat for several)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "parity: compares a layer with its reference; `pytest -m parity` is a parity run"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where dtypes are chosen, leave out the tests of others."""
    chosen = config.getoption("--parity-dtype")
    if not chosen:
        return
    others = [item for item in items if _dtype(item) not in (None, *chosen)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _dtype(item) in (None, *chosen)]


def _dtype(item: pytest.Item) -> Any:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("parity_dtype")


@pytest.fixture
def parity_against(request: pytest.FixtureRequest) -> Any:
    """`parity_against("llama:LlamaAttention").hold(MyLlamaAttention)`, in the dtypes chosen on the command line."""

    def against(reference: str, **settings: Any) -> Against:
        from parity.check.testing import Against

        chosen = request.config.getoption("--parity-dtype")
        return Against(reference, settings | ({"dtypes": tuple(chosen)} if chosen else {}))

    return against
