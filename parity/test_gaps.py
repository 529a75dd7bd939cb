"""Every known gap shows on the installed reference alone, and right beside it there is none.

Reference is held against reference, so a test fails as soon as the reference changes: then the gap's range of versions
gets an end, and what steps around it can go. No candidate takes part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parity import family as families
from parity import gaps, oracle, reference
from parity.compare import TRUTH_BOUND
from parity.gaps import GAPS, Gap, Place
from parity.pair import Pair, forward, gradients, pair_of, run_truth
from parity.property import properties
from parity.reference import Reference
from parity.scenario import Scenario, parse_scenario
from parity.strategies import Pool
from parity.tiny import initialise

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[1]
F64 = torch.float64
SEED = 7


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The root mean square of the difference, relative; infinite where one side is not a number."""
    error = torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double())
    return error.nan_to_num(nan=torch.inf).item()


def pair_at(model_type: str, layer: str, scenario: Scenario) -> Pair:
    """A pair of its own, as modules are changed here."""
    family = families.load(model_type)
    return Pair(family, family.layer(layer), scenario.values)


def outputs(pair: Pair, scenario: Scenario) -> Tensor:
    """What the reference computes in float64 throughout, all chunks joined."""
    record = run_truth(pair, pair.case(scenario), forward)
    pairs = zip(record.quantities, record.values, strict=True)
    return torch.cat([value for quantity, value in pairs if quantity.verdict == "output"], dim=1)


def filled(pair: Pair, side: Reference | None = None) -> Reference:
    """The reference in float64, with weights on which differences show."""
    side = side or pair.reference(F64)
    pair.load(side, initialise.fill(pair.plan, SEED), SEED)
    return side


def from_one_pass(model_type: str, scenario: Scenario) -> float:
    """How far a model's chunks are from its own pass over all tokens."""
    pair = pair_at(model_type, "model", scenario)
    return apart(outputs(pair, scenario), outputs(pair, replace(scenario, schedule=(scenario.length,))))


def eager_from_sdpa(side: Reference, call: Callable[[], Tensor]) -> float:
    """How far the reference's two ways to attend are from each other."""
    results = []
    for way in ("eager", "sdpa"):
        side.use({"_attn_implementation": way})
        with torch.no_grad():
            results.append(call())
    return apart(*results)


def under_mask(mask: Callable[[Tensor], Tensor | None]) -> float:
    """The same of Llama's attention, called on its own with a mask made from the one that is added to scores."""
    scenario = Scenario(schedule=(5,), seed=SEED)
    pair = pair_at("llama", "attention", scenario)
    side, case = filled(pair), pair.case(scenario)
    args, named = side.arguments(case, case.steps[0], case.x, side.tables(case))
    named["attention_mask"] = mask(named["attention_mask"])

    def call() -> Tensor:
        with oracle.lifted():
            return side.output(side.module(*args, **named))["output"]

    return eager_from_sdpa(side, call)


def latent_eps(inside: bool) -> float:
    """As built, and with the configuration's epsilon written into every norm."""
    scenario = Scenario(config=(("eps", 1e-2 if inside else 1e-6),), schedule=(5,), seed=SEED)
    pair = pair_at("deepseek_v3", "attention", scenario)
    built = outputs(pair, scenario)
    for module in pair.reference(F64).module.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = pair.reference_config.rms_norm_eps
    return apart(outputs(pair, scenario), built)


def window_of_one(inside: bool) -> float:
    window = (("window", 1 if inside else 2),)
    return from_one_pass("mistral", Scenario(config=window, schedule=(4, 1, 1, 1), seed=SEED))


def packed_cache(inside: bool) -> float:
    """Two documents in a row beside each alone: with a cache or a mask that hides nothing, whichever is nearer."""
    packed = Scenario(schedule=(6,), packing=(3, 3), seed=SEED)
    pair = pair_at("llama", "model", packed)
    case, alone = pair.case(packed), pair.case(Scenario(schedule=(3,), seed=SEED))
    documents = [run_truth(pair, alone.varied(ids=ids), forward).values[0] for ids in case.ids.split(3, dim=1)]
    if not inside:
        return apart(outputs(pair, packed), torch.cat(documents, dim=1))
    masked = run_truth(pair, case.varied(valid=torch.ones(1, 6, dtype=torch.bool)), forward).values[0]
    cached = outputs(pair, replace(packed, schedule=(5, 1)))
    return min(apart(each, torch.cat(documents, dim=1)) for each in (masked, cached))


def empty_row(inside: bool) -> float:
    """Padded queries, which see nothing before them, and those that are none."""
    scenario = Scenario(schedule=(5,), padding=(2,), seed=SEED)
    pair = pair_at("llama", "model", scenario)
    side, case = filled(pair), pair.case(scenario)

    def call() -> Tensor:
        with oracle.lifted():
            output = side(case, case.steps[0], case.ids)["output"]
        return output[:, :2] if inside else output[:, 2:]

    return eager_from_sdpa(side, call)


def no_mask(inside: bool) -> float:
    return under_mask(lambda mask: None if inside else mask)


def boolean_mask(inside: bool) -> float:
    return under_mask(lambda mask: mask == 0 if inside else mask)


def dynamic_chunks(inside: bool) -> float:
    """Past the limit of 64 tokens, and well within it."""
    dynamic = (("rope", "dynamic"),)
    return from_one_pass("llama", Scenario(config=dynamic, schedule=(6, 1, 1), offset=60 if inside else 1, seed=SEED))


def longrope_chunks(inside: bool) -> float:
    """Across the original limit of 16 tokens, and beyond it from the first."""
    longrope = (("rope", "longrope"),)
    return from_one_pass("llama", Scenario(config=longrope, schedule=(6, 1, 1), offset=10 if inside else 20, seed=SEED))


def dynamic_history(inside: bool) -> float:
    """A prompt past the limit of 64 tokens, and one within it, after a longer one and without that."""
    scenario = Scenario(config=(("rope", "dynamic"),))
    config, x = pair_at("llama", "rotary", scenario).reference_config, torch.zeros(1)

    def tables(*lengths: int) -> Tensor:
        module = reference.layer_class("llama", "LlamaRotaryEmbedding")(config)
        return torch.cat([module(x, torch.arange(length)[None]) for length in lengths][-1])

    length = 70 if inside else 60
    return apart(tables(90, length), tables(length))


def partial_rotary(inside: bool) -> float:
    """How many channels turn under two rope types that say the same."""
    turning, both = [], {"rope_theta": 10000.0, "partial_rotary_factor": 0.5 if inside else 1.0}
    for rope in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 1.0}):
        config = reference.make_config({"model_type": "llama", "head_dim": 8, "rope_parameters": {**rope, **both}})
        module: Any = reference.layer_class("llama", "LlamaRotaryEmbedding")(config)
        turning.append(len(module.inv_freq))
    return abs(turning[0] - turning[1])


def half_buffers(inside: bool) -> float:
    """Read in bfloat16, and read in float32 and then cast, or not."""
    family, directory = families.load("llama"), ROOT / "fixtures" / "llama"
    read, other = (
        reference.load(family, family.layers[-1], directory, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    other = other.to(torch.bfloat16) if inside else other
    return apart(*(model.get_submodule("model.rotary_emb").get_buffer("inv_freq") for model in (other, read)))


def gpt2_scales(inside: bool) -> float:
    scenario = Scenario(config=(("scaled", not inside),), schedule=(5,), seed=SEED)
    pair = pair_at("gpt2", "attention", scenario)
    side, case = filled(pair), pair.case(scenario)
    return eager_from_sdpa(side, lambda: side(case, case.steps[0], case.x)["output"])


def gpt2_upcast(inside: bool) -> float:
    """Infinitely far where eager refuses to run."""
    scenario = Scenario(config=(("upcast", inside),), schedule=(5,), seed=SEED)
    pair = pair_at("gpt2", "attention", scenario)
    as_asked = Reference(replace(pair.family, exact={}), pair.layer, pair.reference_config, F64)
    side, case = filled(pair, as_asked), pair.case(scenario)
    try:
        return eager_from_sdpa(side, lambda: side(case, case.steps[0], case.x)["output"])
    except RuntimeError:
        return math.inf


def jitter_in_place(inside: bool) -> float:
    """What the caller gave, after the call and before it."""
    scenario = Scenario(config=(("jitter", 0.1 if inside else 0.0),), schedule=(5,), seed=SEED)
    pair = pair_at("mixtral", "moe", scenario)
    x = pair.case(scenario).x
    given = x.clone()
    with torch.no_grad(), torch.random.fork_rng():
        filled(pair).module.train()(given)
    return apart(given, x)


def mamba_chunks(inside: bool) -> float:
    return from_one_pass("mamba", Scenario(schedule=(3, 2) if inside else (3, 1, 1), seed=SEED))


def mamba_mask(inside: bool) -> float:
    """A decoding step under the mask of all tokens, and of the new one, from one pass over a padded row."""
    scenario = Scenario(batch=2, schedule=(4, 1), padding=(2, 0), seed=SEED)
    pair = pair_at("mamba", "model", scenario)
    side, case = filled(pair), pair.case(scenario)
    assert case.valid is not None
    masks = case.valid[:, :4], case.valid if inside else case.valid[:, 4:]
    cache = side.new_cache()
    with torch.no_grad(), oracle.lifted():
        whole = side.module(case.ids, attention_mask=case.valid.long()).last_hidden_state
        for ids, mask in zip(case.ids.split([4, 1], dim=1), masks, strict=True):
            last = side.module(ids, attention_mask=mask.long(), cache=cache, use_cache=True).last_hidden_state
    return apart(last[:, -1], whole[:, -1])


def rwkv_rows(inside: bool) -> float:
    """Single tokens of two rows beside each row by itself; another number of tokens is infinitely far."""
    scenario = Scenario(batch=2 if inside else 1, schedule=(2, 1), seed=SEED)
    pair = pair_at("rwkv", "model", scenario)
    chunks, whole = outputs(pair, scenario), outputs(pair, replace(scenario, schedule=(3,)))
    return apart(chunks, whole) if chunks.shape == whole.shape else math.inf


def rwkv_rescaled(inside: bool) -> float:
    """The gradient of a weight that is halved, from that which is not, twice as large in one place."""
    found = []
    for rescale in (0, 1 if inside else 0):
        scenario = Scenario(config=(("rescale", rescale), ("eps", 1e-6)), schedule=(4,), seed=SEED)
        pair = pair_at("rwkv", "model", scenario)
        record = run_truth(pair, pair.case(scenario), gradients)
        found += [v for q, v in zip(record.quantities, record.values, strict=True) if "1.attention.output" in q.name]
    return apart(*found)


def rwkv_eps(inside: bool) -> float:
    """As built, and with the configuration's epsilon written into every norm."""
    scenario = Scenario(config=(("eps", 1e-2 if inside else 1e-5),), schedule=(4,), seed=SEED)
    pair = pair_at("rwkv", "model", scenario)
    built = outputs(pair, scenario)
    for module in pair.reference(F64).module.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = pair.reference_config.layer_norm_epsilon
    return apart(outputs(pair, scenario), built)


def rwkv_width(inside: bool) -> float:
    """With a state from without."""
    scenario = Scenario(config=(("inner", "twice" if inside else "same"),), schedule=(4,), seed=SEED)
    pair = pair_at("rwkv", "attention", scenario)
    side, case = filled(pair), pair.case(scenario)
    with torch.no_grad(), oracle.lifted():
        without = side(case, case.steps[0], case.x)["output"]
        try:
            return apart(side(case, case.steps[0], case.x, cache=side.new_cache())["output"], without)
        except RuntimeError:
            return math.inf


def rwkv_one_layer(inside: bool) -> float:
    try:
        pair_at("rwkv", "model", Scenario(config=(("layers", 1 if inside else 2),))).reference(F64)
    except ZeroDivisionError:
        return math.inf
    return 0.0


def half_fourier(inside: bool) -> float:
    """In half precision from float32; a refusal is infinitely far."""
    x = torch.arange(12.0).view(1, 3, 4)
    transform = pair_at("fnet", "fourier", Scenario()).reference(F64).module
    try:
        (result,) = transform(x.bfloat16() if inside else x)
    except RuntimeError:
        return math.inf
    return apart(result, transform(x)[0])


def fast_from_slow(padding: int, window: int | None, nested: bool) -> tuple[Tensor, Tensor]:
    """An encoder's outputs in eval on both paths, for a row of 6 tokens whose last ones are padding."""
    index = torch.arange(6)
    seen = index[None] <= index[:, None]
    seen = seen if window is None else seen & (index[None] > index[:, None] - window)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dtype=F64)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
        x = torch.randn(1, 6, 8, dtype=F64)
    results = []
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nested tensors are a prototype
                mask = None if nested else ~seen
                results.append(encoder(x, mask=mask, src_key_padding_mask=index[None] >= 6 - padding))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    return results[0], results[1]


def encoder_nan(inside: bool) -> float:
    """More padding than the window is wide, and less."""
    return apart(*fast_from_slow(4 if inside else 1, window=2, nested=False))


def encoder_zeros(inside: bool) -> float:
    """The padded rows, and the others."""
    rows = slice(4, None) if inside else slice(4)
    return apart(*(output[:, rows] for output in fast_from_slow(2, window=None, nested=True)))


DEMONSTRATIONS: Mapping[str, Callable[[bool], float]] = {
    "latent-eps": latent_eps,
    "window-of-one": window_of_one,
    "packed-cache": packed_cache,
    "empty-row": empty_row,
    "no-mask": no_mask,
    "boolean-mask": boolean_mask,
    "dynamic-chunks": dynamic_chunks,
    "dynamic-history": dynamic_history,
    "longrope-chunks": longrope_chunks,
    "partial-rotary": partial_rotary,
    "half-buffers": half_buffers,
    "gpt2-scales": gpt2_scales,
    "gpt2-upcast": gpt2_upcast,
    "jitter-in-place": jitter_in_place,
    "mamba-chunks": mamba_chunks,
    "mamba-mask": mamba_mask,
    "rwkv-rows": rwkv_rows,
    "rwkv-rescaled": rwkv_rescaled,
    "rwkv-eps": rwkv_eps,
    "rwkv-width": rwkv_width,
    "rwkv-one-layer": rwkv_one_layer,
    "half-fourier": half_fourier,
    "encoder-nan": encoder_nan,
    "encoder-zeros": encoder_zeros,
}
"""How far the reference is from itself, inside a gap and right beside it."""

for_every_gap = pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.name)


@for_every_gap
def test_shows_on_the_installed_reference_and_not_beside(gap: Gap) -> None:
    package = gap.versions[0].partition(">")[0]
    here = f"{package} {version(package)}"
    if not gap.known:
        pytest.skip(f"{gap.name} is known in {gap.range}, and {here} is installed")
    shown, beside = DEMONSTRATIONS[gap.name](True), DEMONSTRATIONS[gap.name](False)
    assert shown > TRUTH_BOUND, f"{gap.name} shows no more in {here}: end its range of versions in parity/gaps.py"
    assert beside <= TRUTH_BOUND, f"beside {gap.name} the reference contradicts itself, too, by {beside:.1e}"


PLACES: Mapping[str, tuple[str, str, str]] = {
    "latent-eps": ("deepseek_v3", "block", "eps=0.01 s4 #1"),
    "window-of-one": ("qwen3", "attention", "window=1 s4,1 #1"),
    "packed-cache": ("llama", "model", "s3,1 packed2,2 #1"),
    "dynamic-chunks": ("llama", "model", "rope=dynamic s4,1 @62 #1"),
    "longrope-chunks": ("llama", "logits", "rope=longrope s4,1 @12 #1"),
    "gpt2-scales": ("gpt2", "block", "by_layer=yes s4 #1"),
    "rwkv-rows": ("rwkv", "logits", "b2 s4 #1"),
    "rwkv-rescaled": ("rwkv", "model", "rescale=1 s4 #1"),
    "encoder-zeros": ("transformer", "encoder", "s3 right1 #1"),
}
"""A scenario in each gap that scenarios lead into."""
PROPERTIES = {"rwkv-rows": "generation", "rwkv-rescaled": "gradients"}
"""The property of which it is a scenario, where it is not that of chunks."""


def place_of(model_type: str, layer: str, scenario: Scenario, prop: str = "chunks") -> Place:
    pair = pair_of(model_type, layer, scenario.config)
    return Place(model_type, pair.layer, pair.reference_config, scenario, prop)


@pytest.mark.parametrize("name", PLACES)
def test_a_scenario_leads_in_and_the_one_outside_does_not(name: str) -> None:
    model_type, layer, line = PLACES[name]
    gap, scenario = next(gap for gap in GAPS if gap.name == name), parse_scenario(line)
    prop = PROPERTIES.get(name, "chunks")
    assert gap.applies(place_of(model_type, layer, scenario, prop))
    assert not gap.applies(place_of(model_type, layer, gap.outside(scenario), prop))


@for_every_gap
def test_is_entered_or_avoided_in_a_file_that_names_it(gap: Gap) -> None:
    assert gap.avoided or gap.applies is not gaps._nowhere
    if gap.avoided:
        assert gap.name in (ROOT / gap.avoided).read_text(encoding="utf-8")


@given(st.data())
def test_no_drawn_scenario_leads_into_a_gap_that_is_avoided(data: st.DataObject) -> None:
    family = families.load(data.draw(st.sampled_from(families.names()), label="family"))
    layer = data.draw(st.sampled_from(family.layers), label="layer")
    said = [prop for prop in properties().values() if prop.applies(family, layer)]
    prop = data.draw(st.sampled_from(said), label="property")
    scenario = data.draw(prop.scenarios(family, layer, Pool(dtypes=("f64",))), label="scenario")
    place = place_of(family.model_type, layer.name, scenario, prop.name)
    assert [gap.name for gap in gaps.at(place) if gap.avoided] == []


def test_layers_of_torch_are_recognised_by_their_class() -> None:
    layer = replace(families.load("transformer").layer("encoder_layer"), causal=True)
    padded = Scenario(schedule=(3,), padding=(1,))
    config = pair_of("transformer", "encoder_layer", ()).reference_config
    place = Place("transformer", layer, config, padded, "forward")
    assert [gap.name for gap in gaps.at(place)] == ["encoder-nan", "encoder-zeros"]
    assert not gaps.at(replace(place, scenario=gaps.ENCODER_NAN.outside(padded)))
