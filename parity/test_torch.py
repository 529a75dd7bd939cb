"""torch takes the path that a configuration names, so that both its paths are held; a slow one and a fused one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.pair import Pair, forward, pair_of, run_references, run_truth
from parity.scenario import ScenarioError, parse_scenario
from parity.torch_reference import make_config

pytestmark = pytest.mark.parity

FUSED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
PADDED = "b2 s4 right0,2 #3"


class Operations(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> set[str]:
    with Operations() as noted:
        run()
    return noted.names


def pair(layer: str, **values: bool | str) -> Pair:
    return pair_of("transformer", layer, tuple(values.items()))


@pytest.mark.parametrize("layer", ["attention", "encoder_layer", "encoder"])
@pytest.mark.parametrize("fast", [False, True])
def test_the_fast_path_is_taken_where_the_configuration_says_so(layer: str, fast: bool) -> None:
    both = pair(layer, fast=fast, masking="split")
    case = both.case(parse_scenario(PADDED))
    for run in (
        lambda: run_truth(both, case, forward),
        lambda: run_references(both, case, forward, torch.bfloat16),
    ):
        assert bool(operations(run) & FUSED) == fast


def test_nested_tensors_leave_padded_rows_out_of_the_fast_path() -> None:
    both = pair("encoder", fast=True, masking="split", final_norm=False)
    case = both.case(parse_scenario(PADDED))
    (output,) = run_truth(both, case, forward).values
    assert not output[1, 2:].any()
    assert output[0].all()


@pytest.mark.parametrize("masking", ["float", "boolean", "split", "split_float", "hint"])
def test_every_way_to_tell_torch_who_sees_whom_computes_the_same(masking: str) -> None:
    def output(how: str) -> Tensor:
        both = pair("model", masking=how, layers="2/2")
        case = both.case(parse_scenario("b2 s4 right0,2 m3-1,0 #3"))
        return run_truth(both, case, forward).values[0][case.valid]

    torch.testing.assert_close(output(masking), output("float"), rtol=1e-12, atol=1e-12)


def test_several_chunks_are_refused_as_torch_keeps_no_cache() -> None:
    both = pair("decoder_layer")
    case = both.case(parse_scenario("b1 s3,1 m2"))
    with pytest.raises(ScenarioError, match="TransformerDecoderLayer of torch keeps no cache"):
        run_truth(both, case, forward)


def test_the_configuration_keeps_the_manner_of_calling_to_itself() -> None:
    fields = {"d_model": 8, "calls": {"fast": True}}
    config = make_config(fields)
    config.calls["fast"] = False
    assert config.to_dict() == {"d_model": 8}
    assert fields["calls"] == {"fast": True}
