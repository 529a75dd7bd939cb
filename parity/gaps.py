"""Known divergences inside the reference: places where it contradicts itself, so that no candidate can be blamed.

Each has a name, the versions in which it is known, a sentence and a reason. A mismatch in such a place that is gone
right outside of it is a known gap, not a failure; one that stays is the candidate's own. `parity/test_gaps.py` shows
every gap on the installed reference alone, and fails once it has closed.

Most gaps no drawn scenario meets, as something steps around them: that place names the gap, the gap names the place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from packaging.requirements import Requirement

from parity.family import Kind, Layer
from parity.scenario import Scenario


@dataclass(frozen=True)
class Place:
    """Where a scenario leads: a layer of a model type under a configuration of the reference, and a property of it."""

    model_type: str
    layer: Layer
    config: Any
    scenario: Scenario
    prop: str


def _nowhere(place: Place) -> bool:
    return False


def _same(scenario: Scenario) -> Scenario:
    return scenario


@dataclass(frozen=True)
class Gap:
    """A place where the reference contradicts itself.

    Attributes:
        name: how it is called in the code that steps around it.
        where: model types and classes.
        versions: requirements, any of which says that it is known in the installed version.
        sentence: what the reference does.
        reason: the public issue, or why it does so.
        applies: whether a scenario leads there.
        outside: the nearest scenario that does not.
        avoided: the file which sees to it that no drawn scenario leads there, if one does.
    """

    name: str
    where: str
    versions: tuple[str, ...]
    sentence: str
    reason: str
    applies: Callable[[Place], bool] = _nowhere
    outside: Callable[[Scenario], Scenario] = _same
    avoided: str = ""

    @property
    def known(self) -> bool:
        """Whether it is recorded for what is installed."""
        return any(_installed(Requirement(each)) for each in self.versions)

    @property
    def range(self) -> str:
        """The versions in which it is known, in words."""
        return " or ".join(self.versions)

    def __str__(self) -> str:
        return f"{self.sentence} ({self.range})"


def _installed(wanted: Requirement) -> bool:
    return wanted.specifier.contains(version(wanted.name), prereleases=True)


def at(place: Place) -> list[Gap]:
    """The gaps that are known in what is installed and that a scenario leads into."""
    return [gap for gap in GAPS if gap.known and gap.applies(place)]


EVERY = ("transformers>=4.57.6",)
TORCH = ("torch>=2.13",)


def _without(*axes: str) -> Callable[[Scenario], Scenario]:
    """Some axes at their first choice."""
    return lambda scenario: replace(scenario, config=tuple(each for each in scenario.config if each[0] not in axes))


def _in_one_chunk(scenario: Scenario) -> Scenario:
    return replace(scenario, schedule=(scenario.length,))


def _unpadded(scenario: Scenario) -> Scenario:
    return replace(scenario, padding=())


# Norms


def _another_eps(place: Place) -> bool:
    return place.model_type == "deepseek_v3" and place.layer.kind.attends and place.config.rms_norm_eps != 1e-6


LATENT_EPS = Gap(
    "latent-eps",
    "deepseek_v3: DeepseekV3Attention and all that hold it",
    EVERY,
    "the norms of the latents take 1e-6 for their epsilon, while all others take rms_norm_eps",
    "transformers#44261; so does the code that the model was published with",
    _another_eps,
    _without("eps"),
)

# Caches and masks


def _window_of_one(place: Place) -> bool:
    config, layer = place.config, place.layer
    if not layer.kind.attends or getattr(config, "sliding_window", None) != 1:
        return False
    return layer.kind is Kind.MODEL or layer.window(config) == 1


def _two_wide(scenario: Scenario) -> Scenario:
    others = tuple(each for each in scenario.config if each[0] != "window")
    return replace(scenario, config=(*others, ("window", 2)))


WINDOW_OF_ONE = Gap(
    "window-of-one",
    "mistral, mixtral, qwen2, qwen3: what attends, with DynamicCache(config)",
    EVERY,
    "the cache of a window of 1 keeps every token, not none, so that a decoding step sees them all and a chunk fails",
    "what is kept is sliced from -window + 1, which is 0, so from the start",
    _window_of_one,
    _two_wide,
    "parity/axes.py",
)

PACKED_CACHE = Gap(
    "packed-cache",
    "all models that are called with position_ids",
    EVERY,
    "positions that begin anew keep documents apart in a call without mask and cache only",
    "transformers#46634: meant for training without padding",
    lambda place: place.layer.kind is Kind.MODEL and bool(place.scenario.packing) and len(place.scenario.schedule) > 1,
    _in_one_chunk,
    "parity/strategies.py",
)

EMPTY_ROW = Gap(
    "empty-row",
    "all models under padding, eager against sdpa",
    EVERY,
    "a query that may see no key gets the average of all values from eager, zeros from sdpa",
    "eager adds the dtype's least number to every score, after which all are alike",
    avoided="parity/case.py",
)

NO_MASK = Gap(
    "no-mask",
    "attention and blocks called on their own, eager against sdpa",
    EVERY,
    "without a mask eager lets a token see those after it, sdpa does not",
    "sdpa takes a missing mask for a causal one, eager for none",
    avoided="parity/case.py",
)

BOOLEAN_MASK = Gap(
    "boolean-mask",
    "attention and blocks called on their own, eager against sdpa",
    EVERY,
    "a boolean mask is heeded by sdpa, while eager adds it to the scores as 0 and 1",
    "a whole model makes each its own kind of mask",
    avoided="parity/case.py",
)

# Rotary frequencies


_LENGTH = "max_position_embeddings"


def _rescaled(place: Place, rope_type: str) -> bool:
    """Whether chunks are held against one pass by a model, which makes its own tables, and are turned otherwise.

    Chunk by chunk the reference is well defined; it is the two that contradict each other.
    """
    rope, limit = getattr(place.config, "rope_parameters", None) or {}, getattr(place.config, _LENGTH, 0)
    if place.prop != "chunks" or place.layer.kind is not Kind.MODEL or rope.get("rope_type") != rope_type:
        return False
    first, last = (place.scenario.offset + length for length in (place.scenario.schedule[0], place.scenario.length))
    if rope_type == "dynamic":
        return first < last and last > limit
    return first <= rope.get("original_max_position_embeddings", limit) < last


DYNAMIC_CHUNKS = Gap(
    "dynamic-chunks",
    "all models with rope_type dynamic",
    EVERY,
    "keys cached before the length passed the limit keep other frequencies than one pass gives them",
    "transformers#25104: the frequencies follow from the length so far, the cache holds rotated keys",
    lambda place: _rescaled(place, "dynamic"),
    _in_one_chunk,
    "parity/properties/chunks.py",
)

DYNAMIC_HISTORY = Gap(
    "dynamic-history",
    "all models with rope_type dynamic",
    ("transformers>=4.57.6,<5", "transformers>=5.13"),
    "past the limit a prompt gets the frequencies of the longest that the module ever saw",
    "transformers#25306: computed anew for a longer prompt, reset by one within the limit, but never less",
    avoided="parity/pair.py",
)

LONGROPE_CHUNKS = Gap(
    "longrope-chunks",
    "all models with rope_type longrope",
    EVERY,
    "keys cached before the length passed the original limit keep the short factors, one pass gives them the long ones",
    "transformers#33129: Phi-3 drops its cache there while it generates; other models do not",
    lambda place: _rescaled(place, "longrope"),
    _in_one_chunk,
    "parity/properties/chunks.py",
)

PARTIAL_ROTARY = Gap(
    "partial-rotary",
    "llama and its descendants: rotary tables",
    ("transformers>=5.6",),
    "the default rope type ignores partial_rotary_factor, every other one heeds it",
    "since version 5 each model has a default type of its own",
    avoided="parity/test_rope_tables.py",
)

HALF_BUFFERS = Gap(
    "half-buffers",
    "all models with rotary tables",
    EVERY,
    "model.to(bfloat16) rounds the rotary frequencies, from_pretrained(dtype=bfloat16) does not",
    "a cast takes buffers along, loading writes parameters only",
    avoided="parity/reference.py",
)

# GPT-2

GPT2_SCALES = Gap(
    "gpt2-scales",
    "gpt2: GPT2Attention and all that hold it, eager against sdpa",
    ("transformers>=4.57.6,<5",),
    "sdpa ignores scale_attn_weights and scale_attn_by_inverse_layer_idx",
    "transformers#44380",
    lambda place: (
        place.model_type == "gpt2"
        and place.layer.kind.attends
        and (not place.config.scale_attn_weights or place.config.scale_attn_by_inverse_layer_idx)
    ),
    _without("scaled", "by_layer"),
)

GPT2_UPCAST = Gap(
    "gpt2-upcast",
    "gpt2: GPT2Attention and all that hold it, eager against sdpa",
    EVERY,
    "with reorder_and_upcast_attn eager fails in float64, while sdpa ignores the option",
    "eager checks that its scores are float32",
    avoided="parity/families/gpt2.py",
)

# Experts

JITTER_IN_PLACE = Gap(
    "jitter-in-place",
    "mixtral: MixtralSparseMoeBlock",
    EVERY,
    "in training with router_jitter_noise the caller's hidden states are multiplied in place",
    "an in-place product before the router, so that experts get the noise, too; compare transformers#33969",
    avoided="parity/axes.py",
)

# Recurrences

MAMBA_CHUNKS = Gap(
    "mamba-chunks",
    "mamba: MambaMixer and all that hold it, with a cache",
    EVERY,
    "a chunk of several tokens after the first begins anew, though the cache holds a state",
    "the scan is given no state to begin from; single tokens are",
    avoided="parity/families/mamba.py",
)

MAMBA_MASK = Gap(
    "mamba-mask",
    "mamba: all models, with a cache",
    EVERY,
    "the mask of a decoding step must be that of the new token alone; under that of all tokens it goes wrong",
    "hidden states are multiplied by the mask, which broadcasts; models that attend want that of all tokens",
    avoided="parity/reference.py",
)


def _single_tokens_of_rows(place: Place) -> bool:
    if place.model_type != "rwkv" or place.scenario.rows == 1 or not place.layer.recurrent:
        return False
    return place.prop == "generation" or (place.prop == "forward" and 1 in place.scenario.schedule)


RWKV_ROWS = Gap(
    "rwkv-rows",
    "rwkv: RwkvSelfAttention, RwkvFeedForward and all that hold them, with a state",
    EVERY,
    "given one token of each of several rows, it returns as many tokens per row as there are rows",
    "the tokens before, [rows, hidden], broadcast against those of now, [rows, 1, hidden]",
    _single_tokens_of_rows,
    lambda scenario: replace(scenario, batch=1, stack=1, padding=()),
    "parity/properties/generation.py",
)

RWKV_RESCALED = Gap(
    "rwkv-rescaled",
    "rwkv: all models in evaluation, where rescale_every is not 0",
    EVERY,
    "gradients of the weights that the first pass divides in place are those of the divided weights",
    "meant for inference; in training nothing is divided",
    lambda place: (
        place.model_type == "rwkv"
        and place.prop == "gradients"
        and place.layer.kind is Kind.MODEL
        and 0 < place.config.rescale_every < place.config.num_hidden_layers
    ),
    _without("rescale"),
    "parity/families/rwkv.py",
)

RWKV_EPS = Gap(
    "rwkv-eps",
    "rwkv: RwkvModel and all that hold it",
    EVERY,
    "the last norm takes 1e-5 for its epsilon, while all others take layer_norm_epsilon",
    "it is built without one",
    avoided="parity/families/rwkv.py",
)

RWKV_WIDTH = Gap(
    "rwkv-width",
    "rwkv: RwkvSelfAttention and all that hold it, with a state",
    EVERY,
    "where attention_hidden_size is not hidden_size, a call without a state computes, one with a state fails",
    "the model makes all states as wide as hidden states",
    avoided="parity/families/rwkv.py",
)

RWKV_ONE_LAYER = Gap(
    "rwkv-one-layer",
    "rwkv: RwkvModel and all that hold it",
    EVERY,
    "a model of one layer cannot be built, though such a configuration can",
    "its initialisation divides by the number of layers less one",
    avoided="parity/families/rwkv.py",
)

# torch

HALF_FOURIER = Gap(
    "half-fourier",
    "fnet: FNetBasicFourierTransform and all that hold it",
    TORCH,
    "on a CPU the Fourier transform is refused in bfloat16 and float16, in which the model can be loaded",
    "torch.fft hands it to a library that knows single and double precision",
    avoided="parity/families/fnet.py",
)


def _encoder(place: Place) -> bool:
    return place.layer.reference.startswith("TransformerEncoder") and any(place.scenario.padding)


ENCODER_NAN = Gap(
    "encoder-nan",
    "torch: nn.TransformerEncoderLayer and nn.TransformerEncoder in eval",
    TORCH,
    "a query that may see no key is NaN on the fast path, which the next layer spreads, and finite on the slow one",
    "pytorch#190486: softmax over nothing",
    lambda place: _encoder(place) and place.layer.causal,
    _unpadded,
)

ENCODER_ZEROS = Gap(
    "encoder-zeros",
    "torch: nn.TransformerEncoder in eval, with norm_first=False and enable_nested_tensor",
    TORCH,
    "padded rows are zeros on the fast path, values on the slow one",
    "nested tensors leave them out, and fill up with zeros",
    _encoder,
    _unpadded,
)

GAPS = (
    LATENT_EPS,
    WINDOW_OF_ONE,
    PACKED_CACHE,
    EMPTY_ROW,
    NO_MASK,
    BOOLEAN_MASK,
    DYNAMIC_CHUNKS,
    DYNAMIC_HISTORY,
    LONGROPE_CHUNKS,
    PARTIAL_ROTARY,
    HALF_BUFFERS,
    GPT2_SCALES,
    GPT2_UPCAST,
    JITTER_IN_PLACE,
    MAMBA_CHUNKS,
    MAMBA_MASK,
    RWKV_ROWS,
    RWKV_RESCALED,
    RWKV_EPS,
    RWKV_WIDTH,
    RWKV_ONE_LAYER,
    HALF_FOURIER,
    ENCODER_NAN,
    ENCODER_ZEROS,
)
