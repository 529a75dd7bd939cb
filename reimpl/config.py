"""Reading config.json: every field is read, declared irrelevant, or refused by name.

A field that is parsed and then ignored is the commonest cause of a wrong port, and one that falls back to a default the
most silent. So a configuration class names what it reads (its fields), what cannot change what it computes
(`IRRELEVANT`, each with a reason) and what has one supported value (`ONLY`); anything else is an error. The rope fields
of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) become one dictionary, as 5 spells it.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from reimpl.feedforward import ACTIVATIONS
from reimpl.rope import ROPE_TYPES, inverse_frequencies

C = TypeVar("C", bound="Config")


class ConfigError(ValueError):
    """A configuration that cannot be understood, or that contradicts itself."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or nothing where no known name comes near."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


LARGEST_SIZE = 2**24  # of one axis, beyond any model, so that a wrong digit is found before memory is asked for
LABELS, OUTPUTS, DECODING, TRAINING, ORIGIN = "labels", "outputs", "decoding", "training", "origin"

GENERIC: Mapping[str, str] = {
    name: reason
    for reason, names in {
        ORIGIN: "_name_or_path architectures auto_map dtype torch_dtype transformers_version transformers.js_config",
        OUTPUTS: "output_attentions output_hidden_states return_dict tf_legacy_loss torchscript use_cache",
        LABELS: "finetuning_task id2label label2id num_labels problem_type task_specific_params",
        TRAINING: "chunk_size_feed_forward gradient_checkpointing initializer_range use_bfloat16",
        DECODING: """
            bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
            early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
            forced_bos_token_id forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size
            num_beam_groups num_beams num_return_sequences output_scores prefix remove_invalid_values
            repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature tokenizer_class
            top_k top_p typical_p
        """,
    }.items()
    for name in names.split()
}
"""What transformers writes beside the fields of a model, and what the field is for instead."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the configurations: a subclass lists the fields of config.json that change what its model computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = GENERIC
    ONLY: ClassVar[Mapping[str, Any]] = {
        "add_cross_attention": False,
        "cross_attention_hidden_size": None,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
        "tie_encoder_decoder": False,
    }
    SIZES: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_dict(cls: type[C], mapping: Mapping[str, Any]) -> C:
        """Read the fields of a config.json, raising ConfigError where one is unknown, missing or of no use."""
        known = {field.name for field in fields(cls)}
        given = with_rope_parameters(mapping) if "rope_parameters" in known else dict(mapping)
        read = {}
        for name, value in given.items():
            if name in known:
                read[name] = value
            elif name in cls.ONLY:
                if value != cls.ONLY[name]:
                    raise ConfigError(
                        f"{name} is {value!r}: this model computes {name} = {cls.ONLY[name]!r} only; take the"
                        " class for such a model, or correct the field"
                    )
            elif name not in cls.IRRELEVANT:
                hint = nearest(name, known)
                raise ConfigError(
                    f"unknown field {name!r}{hint}: {cls.__name__} neither reads it nor knows it to change nothing;"
                    " correct its name, or remove it if the model does not depend on it"
                )
        cls.complete(read)
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in read]
        if missing:
            raise ConfigError(f"{', '.join(missing)} missing: {cls.__name__} has no default for it; add it")
        return cls(**{field.name: _typed(field, read[field.name]) for field in fields(cls) if field.name in read})

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        """Fill in fields that follow from others where config.json leaves them out or null."""

    def __post_init__(self) -> None:
        for name in self.SIZES:
            between(getattr(self, name), 1, LARGEST_SIZE, name)


def _typed(field: Field, value: Any) -> Any:
    """The value, if JSON's type is the field's: true is no number, and a whole number may stand for a real one."""
    expected: Any = field.type
    if expected is float and type(value) is int and abs(value) <= sys.maxsize:
        return float(value)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        wanted = getattr(expected, "__name__", str(expected))
        raise ConfigError(f"{field.name} is {value!r}: it must be of type {wanted}; correct it")
    return value


def between(value: float | int, low: float | int, high: float | int, name: str) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: it must be between {low} and {high}; correct it")


def divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    """Refuse a count that does not divide what is split by it."""
    if whole % part:
        raise ConfigError(f"{part_name} is {part}, which does not divide {whole_name}, {whole}: correct one of them")


def follows(value: int, source: int, name: str, source_name: str) -> None:
    """Refuse a field that contradicts those it follows from."""
    if value != source:
        raise ConfigError(f"{name} is {value}, but {source_name} gives {source}: remove it, or correct one of them")


def shared(read: Mapping[str, Any], whole: str, parts: str) -> int | None:
    """What each of the parts gets of the whole; None where they are no sizes, which is reported with the fields."""
    size, count = read.get(whole), read.get(parts)
    if not isinstance(size, int) or not isinstance(count, int) or count < 1:
        return None
    divides(count, size, parts, whole)
    return size // count


def known_activation(name: str, field: str) -> None:
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ConfigError(f"{field} is {name!r}{nearest(name, ACTIVATIONS)}: correct it to one of {known}")


ROPE_FIELDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    rope_type: (frozenset(required.split()), frozenset(optional.split()))
    for rope_type, required, optional in (
        ("default", "", ""),
        ("linear", "factor", ""),
        ("dynamic", "factor", ""),
        ("proportional", "", "factor"),
        ("llama3", "factor low_freq_factor high_freq_factor original_max_position_embeddings", ""),
        ("yarn", "", "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"),
        ("longrope", "short_factor long_factor", "factor attention_factor"),
    )
}
"""What each rope type reads besides what all may hold: what must be there, and what may."""

ROPE_COMMON = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})
DEFAULT_ROPE_THETA = 10000.0  # what a config.json without one means, as the first Llama's


def with_rope_parameters(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The rope fields of either spelling as one `rope_parameters`. Both may be there, if they agree."""
    rest = dict(mapping)
    scaling = rest.pop("rope_scaling", None)
    parameters = rest.pop("rope_parameters", None)
    aside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    spread = {name: rest.pop(name) for name in aside if rest.get(name) is not None}
    merged: dict[str, Any] = {}
    for source, found in (("rope_parameters", parameters), ("rope_scaling", scaling), ("the top level", spread)):
        if not isinstance(found, Mapping | None):
            raise ConfigError(f"{source} is {found!r}: correct it to an object of fields, or null")
        for name, value in _with_rope_type(found or {}, source).items():
            if merged.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name} is {merged[name]!r} in one place and {value!r} in {source}: the rope fields of"
                    " transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) contradict; remove one of them"
                )
    rest["rope_parameters"] = {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA, **merged}
    return {name: value for name, value in rest.items() if name not in aside}


def _with_rope_type(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields that are set, with the old key `type` renamed."""
    given = {name: value for name, value in found.items() if value is not None}
    old = given.pop("type", None)
    if old is not None and given.setdefault("rope_type", old) != old:
        raise ConfigError(f"type is {old!r} and rope_type {given['rope_type']!r} in {source}: remove the wrong one")
    return given


def check_rope(rope: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> None:
    """Refuse what RotaryEmbedding cannot be built from, or would ignore."""
    rope_type = rope.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type is {rope_type!r}{nearest(str(rope_type), ROPE_TYPES)}: correct it to one of"
            f" {', '.join(ROPE_TYPES)}"
        )
    required, optional = ROPE_FIELDS[rope_type]
    if missing := sorted(required - rope.keys()):
        raise ConfigError(f"rope_parameters lacks {', '.join(missing)}, which rope_type {rope_type!r} needs: add it")
    readable = required | optional | ROPE_COMMON
    for name, value in rope.items():
        if name not in readable:
            raise ConfigError(
                f"rope_parameters holds {name!r}{nearest(name, readable)}, which rope_type {rope_type!r} does not read:"
                f" remove it, or correct it to one of {', '.join(sorted(readable))}"
            )
        _check_rope_field(name, value)
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if width % 2 or width < 2:
        raise ConfigError(
            f"{width} of head_dim {head_dim} channels would be rotated, but they form pairs: correct head_dim, or"
            " partial_rotary_factor, so that their number is even"
        )
    for name in ("short_factor", "long_factor"):
        if name in readable and len(rope[name]) != width // 2:
            raise ConfigError(
                f"{name} holds {len(rope[name])} numbers: correct it to one for each of the {width // 2} pairs"
            )
    try:
        inverse_frequencies(rope, head_dim, max_position_embeddings)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(f"rope_parameters {dict(rope)} define no frequencies ({error}): correct them") from error


def _check_rope_field(name: str, value: Any) -> None:
    if name == "rope_type":
        return
    if name == "truncate":
        valid, wanted = isinstance(value, bool), "true or false"
    elif name in ("short_factor", "long_factor"):
        valid, wanted = isinstance(value, list | tuple) and all(map(_is_positive, value)), "a list of positive numbers"
    else:
        valid, wanted = _is_positive(value), "a positive number"
    if not valid:
        raise ConfigError(f"{name} in rope_parameters is {value!r}: correct it to {wanted}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
