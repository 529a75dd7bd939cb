"""What every test run shares: options, Hypothesis profile, shape checks, and the header that says what was tested."""

import importlib.metadata

import pytest
import torch
from jaxtyping import install_import_hook

from parity.allocator import keep_memory
from parity.profiles import EXAMPLES, ProfileError, load_profile

pytest_plugins = ["pytester", "parity.plugin", "parity.meta.reasons"]

PROFILE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--parity-model", action="append", metavar="MODEL", help="only families of this model_type")
    group.addoption("--parity-layer", action="append", metavar="LAYER", help="only layers of this name")
    group.addoption(
        "--parity-shapes",
        choices=("on", "off"),
        default="on",
        help="assert the shapes in reimpl's signatures (default: on); off measures without paying for it",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[PROFILE] = load_profile()
    except ProfileError as error:
        raise pytest.UsageError(str(error)) from None
    torch.set_num_threads(1)
    keep_memory()
    if config.getoption("--parity-shapes") == "on":
        install_import_hook("reimpl", "beartype.beartype")

    check_choice(config)


def check_choice(config: pytest.Config) -> None:
    """Refuse families and layers that there are not."""
    from parity.family import FamilyError, load, names

    models, layers = config.getoption("--parity-model"), config.getoption("--parity-layer")
    if not models and not layers:
        return
    try:
        families = [load(model) for model in models or names()]
        for name in layers or ():
            if not any(name in (layer.name, layer.reference) for family in families for layer in family.layers):
                families[0].layer(name)
    except FamilyError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where families, layers or dtypes are chosen, leave out the parity tests that are of none of them."""
    if not any(config.getoption(f"--parity-{name}") for name in ("model", "layer", "dtype")):
        return
    from parity.rows import Row

    def chosen(item: pytest.Item) -> bool:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return item.get_closest_marker("parity") is None or isinstance(parameters.get("row"), Row)

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `row` runs once for every layer that its module's PROPERTY applies to."""
    if "row" in metafunc.fixturenames:
        from parity.rows import rows
        from parity.scenario import DTYPE_NAMES

        models, layers, dtypes = (metafunc.config.getoption(f"--parity-{name}") for name in ("model", "layer", "dtype"))
        chosen = rows(
            metafunc.module.PROPERTY, models or (), layers or (), [DTYPE_NAMES[name] for name in dtypes or ()]
        )
        metafunc.parametrize("row", list(chosen), ids=str)


def pytest_report_header(config: pytest.Config) -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "hypothesis")]
    profile = config.stash[PROFILE]
    shapes = config.getoption("--parity-shapes")
    return f"parity: {', '.join(versions)}, profile {profile} ({EXAMPLES[profile]} examples), shapes {shapes}"
