"""Rules carry weights between disk and module in both directions, and nothing is left over or unfilled."""

import pytest
import torch
from torch import Tensor, nn

from reimpl.rope import half_order
from reimpl.weights import (
    Derived,
    Permuted,
    Rule,
    Same,
    Split,
    Stacked,
    Tied,
    Transposed,
    WeightError,
    below,
    fill,
    to_disk,
    to_module,
)

HEAD_DIM = 4
RULES: tuple[Rule, ...] = (
    Same("wte.weight", "embed.weight"),
    Transposed("c_fc.weight", "up.weight"),
    Split("c_attn.weight", ("q.weight", "k.weight", "v.weight"), (8, 4, 4)),
    Split("c_fused.bias", ("gate.bias", "fused.bias"), (3, 2)),
    Stacked(("experts.0.w1", "experts.1.w1", "experts.2.w1"), "experts.w1"),
    Stacked((("experts.0.gate", "experts.0.up"), ("experts.1.gate", "experts.1.up")), "experts.gate_up"),
    Permuted("rope.weight", "turned.weight", tuple(half_order(HEAD_DIM).tolist())),
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def on_disk() -> dict[str, Tensor]:
    return {
        "wte.weight": drawn(7, 5),
        "c_fc.weight": drawn(5, 6),
        "c_attn.weight": drawn(16, 5),
        "c_fused.bias": drawn(5),
        **{f"experts.{expert}.w1": drawn(3, 4) + expert for expert in range(3)},
        **{
            f"experts.{expert}.{part}": drawn(3, 2) * 2**expert + len(part)
            for expert in range(2)
            for part in ("gate", "up")
        },
        "rope.weight": drawn(HEAD_DIM, 3),
        "norm.weight": drawn(5),
    }


def test_what_goes_to_the_module_and_back_is_what_was_on_disk() -> None:
    disk = on_disk()
    back = to_disk(to_module(disk, RULES), RULES)
    assert back.keys() == disk.keys()
    assert all(torch.equal(back[name], disk[name]) for name in disk)


def test_each_rule_puts_numbers_where_it_says() -> None:
    disk, module = on_disk(), to_module(on_disk(), RULES)
    assert torch.equal(module["embed.weight"], disk["wte.weight"])
    assert torch.equal(module["up.weight"], disk["c_fc.weight"].T)
    assert torch.equal(module["k.weight"], disk["c_attn.weight"][8:12])
    assert torch.equal(module["fused.bias"], disk["c_fused.bias"][3:])
    assert torch.equal(module["experts.w1"][2], disk["experts.2.w1"])
    assert torch.equal(module["experts.gate_up"][1, :3], disk["experts.1.gate"])
    assert torch.equal(module["experts.gate_up"][1, 3:], disk["experts.1.up"])
    assert torch.equal(module["turned.weight"], disk["rope.weight"][[0, 2, 1, 3]])
    assert torch.equal(module["norm.weight"], disk["norm.weight"])  # no rule names it, so it keeps its name


def test_the_rules_below_a_prefix_are_those_that_name_tensors_there() -> None:
    assert below(RULES, "experts.1.") == (RULES[4], RULES[5])
    assert below((Derived("inv_freq"), *RULES), "rope.") == RULES[-1:]
    assert below(RULES, "lm_head.") == ()


def test_a_conversion_leaves_its_argument_alone() -> None:
    disk = on_disk()
    to_module(disk, RULES)
    assert disk.keys() == on_disk().keys()


class Tiny(nn.Module):
    """A linear map, a buffer that is saved, one that is not, and a second name for the map's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2)
        self.twin = nn.Linear(3, 2, bias=False)
        self.twin.weight = self.map.weight
        self.register_buffer("saved", torch.zeros(4))
        self.register_buffer("computed", torch.ones(5), persistent=False)


def fitting() -> dict[str, Tensor]:
    return {"map.weight": drawn(2, 3), "map.bias": drawn(2), "saved": drawn(4)}


def test_every_parameter_and_saved_buffer_is_filled() -> None:
    tiny = Tiny()
    fill(tiny, fitting())
    assert torch.equal(tiny.twin.weight, fitting()["map.weight"])
    assert torch.equal(tiny.map.bias, fitting()["map.bias"])
    assert torch.equal(tiny.get_buffer("saved"), fitting()["saved"])
    assert torch.equal(tiny.get_buffer("computed"), torch.ones(5))


@pytest.mark.parametrize("name", fitting())
def test_a_parameter_that_is_not_filled_is_refused_and_left_nan(name: str) -> None:
    tiny, tensors = Tiny(), fitting()
    del tensors[name]
    with pytest.raises(WeightError, match=f"tensor '{name}' is missing, which the config asks for"):
        fill(tiny, tensors)
    assert all(tensor.isnan().all() for tensor in tiny.state_dict().values())


def test_a_tensor_left_over_is_refused() -> None:
    with pytest.raises(WeightError, match=r"tensor 'mop.weight' is left over: the config asks for no such tensor"):
        fill(Tiny(), fitting() | {"mop.weight": drawn(2, 3)})


def test_a_tensor_that_several_rules_need_is_refused() -> None:
    with pytest.raises(WeightError, match=r"tensor 'wte.weight' is missing"):
        to_module(on_disk(), (*RULES, Same("wte.weight", "other.weight")))


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,), (2, 3, 1)], ids=str)
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match=r"tensor 'map.weight' has shape \(.*\), but the config asks for \(2, 3\)"):
        fill(Tiny(), fitting() | {"map.weight": drawn(*shape)})


def test_whole_numbers_are_no_weights() -> None:
    with pytest.raises(WeightError, match=r"tensor 'map.bias' is torch.int8, .*quantised weights are not read"):
        fill(Tiny(), fitting() | {"map.bias": torch.ones(2, dtype=torch.int8)})


BROKEN: dict[str, tuple[Rule, dict[str, Tensor], str]] = {
    "packed tensor too short": (
        RULES[2],
        {"c_attn.weight": drawn(15, 5)},
        r"axis 0 must hold 8 \+ 4 \+ 4 = 16 for q.weight",
    ),
    "packed tensor without that axis": (Split("a", ("b", "c"), (1, 1), dim=1), {"a": drawn(2)}, "axis 1 must hold"),
    "experts of two shapes": (
        RULES[4],
        {f"experts.{expert}.w1": drawn(3, 4 + expert // 2) for expert in range(3)},
        r"tensor 'experts.2.w1' has shape \(3, 5\), but 'experts.0.w1'",
    ),
    "an expert missing": (RULES[4], {"experts.0.w1": drawn(3, 4)}, "tensor 'experts.1.w1' is missing"),
    "another number of heads": (RULES[-1], {"rope.weight": drawn(8, 3)}, "but 4 are to be permuted along axis 0"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_rule_refuses_what_it_cannot_convert(what: str) -> None:
    rule, disk, message = BROKEN[what]
    with pytest.raises(WeightError, match=message):
        to_module(disk, [rule])


def test_a_tied_tensor_may_be_there_if_it_is_equal() -> None:
    tied, weight = Tied("twin.weight", "map.weight"), drawn(2, 3)
    assert to_module({"map.weight": weight, "twin.weight": weight.clone()}, [tied]).keys() == {"map.weight"}
    assert to_disk({"map.weight": weight}, [tied]).keys() == {"map.weight"}
    with pytest.raises(WeightError, match=r"'twin.weight' differs from 'map.weight', but the config ties them"):
        to_module({"map.weight": weight, "twin.weight": weight + 1}, [tied])


def test_what_follows_from_the_config_is_not_read() -> None:
    derived = Derived("rotary_emb.inv_freq")
    disk = {"layers.0.rotary_emb.inv_freq": drawn(3), "norm.weight": drawn(2)}
    assert to_module(disk, [derived]).keys() == {"norm.weight"}
    assert to_disk({"norm.weight": drawn(2)}, [derived]).keys() == {"norm.weight"}
