"""Axes of configuration spaces that several families share, and the fields they turn into."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from parity.family import Axis
from parity.scenario import AxisValue

HEADS = Axis("heads", ("2/1", "1/1", "4/4", "4/1", "8/4", "6/3"), "query heads / key-value heads")
HEAD_DIM = Axis("head_dim", (4, 8, 6, 10), "width of a head, independent of hidden_size / heads")
THETA = Axis("theta", (10000.0, 500000.0, 100.0), "base of the rotary frequencies (rope_theta)")
EPS = Axis("eps", (1e-6, 1e-5, 1e-2), "rms_norm_eps")
ACT = Axis("act", ("silu", "gelu", "gelu_pytorch_tanh", "relu"), "hidden_act")
SQUARE = Axis("square", (False, True), "sizes that coincide, so that a swap makes no shape error")
LAYERS = Axis("layers", (1, 2, 3), "num_hidden_layers")
TIE = Axis("tie", (False, True), "tie_word_embeddings")
ATTEND = Axis("attend", ("fused", "eager", "tiled"), "our implementation of the scaled dot product")

WINDOW = Axis("window", (0, 3, 5, 2), "sliding_window; 0 for none; 1 is the gap window-of-one", undrawn=(1,))
MANY = Axis("many", (0, 64, 256), "so many experts, where it is not 0")
DISPATCH = Axis("dispatch", ("sorted", "dense"), "our way from tokens to their experts and back")
JITTER = Axis("jitter", (0.0, 0.1), "router_jitter_noise, for training only: gap jitter-in-place")
EXPERT_UNIT = 8
"""What sizes are multiples of in a model with experts: `grouped_mm` wants rows of 16 bytes, in half precision too."""

ORIGINAL_LENGTH, MAX_LENGTH = 16, 64
"""So short that drawn positions lie on both sides of every threshold at which frequencies are rescaled."""

_SCALINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}
ROPE = Axis("rope", tuple(_SCALINGS), "scaling of the rotary frequencies (rope_type)")


def heads(point: Mapping[str, AxisValue]) -> tuple[int, int]:
    """Query heads and key/value heads."""
    query, _, key_value = str(point["heads"]).partition("/")
    return int(query), int(key_value)


def rope_parameters(point: Mapping[str, AxisValue], rotary: int) -> dict[str, Any]:
    """The rope fields of a configuration, in the spelling of transformers 5.

    Args:
        rotary: channels of a head that are rotated; LongRoPE has a factor for each pair of them.
    """
    name = str(point["rope"])
    fields = {"rope_type": name, "rope_theta": point["theta"], **_SCALINGS[name]}
    if name == "longrope":
        fields["short_factor"] = [1.0 + 0.25 * i for i in range(rotary // 2)]
        fields["long_factor"] = [2.0 + 0.5 * i for i in range(rotary // 2)]
    return fields


def lopsided(point: Mapping[str, AxisValue], unit: int = 1) -> dict[str, int]:
    """Sizes of which no two coincide, or, on the square axis, of which as many as possible do.

    hidden_size must be a multiple of the heads, but is not heads * head_dim, unless square. Unless square, sizes are
    multiples of `unit`.
    """
    query, _ = heads(point)
    inner = query * int(point["head_dim"])
    if point["square"]:
        return {"hidden_size": inner, "intermediate_size": inner}
    step = lcm(query, unit)
    hidden = step * -(-35 // step)
    return {"hidden_size": hidden if hidden != inner else hidden + step, "intermediate_size": unit * -(-44 // unit)}


PRE_NORM = (HEADS, HEAD_DIM, ROPE, THETA, EPS, ACT, SQUARE, LAYERS, TIE, ATTEND)
"""The axes of Llama and its descendants."""


def pre_norm(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """The fields of a configuration that follow from the axes of Llama and its descendants."""
    query, key_value = heads(point)
    return lopsided(point) | {
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "head_dim": point["head_dim"],
        "rope_parameters": rope_parameters(point, int(point["head_dim"])),
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": point["eps"],
        "hidden_act": point["act"],
        "num_hidden_layers": point["layers"],
        "tie_word_embeddings": point["tie"],
    }


FIRST_WINDOW = Axis("first_window", (0, 1), "max_window_layers: the first layer that has the window")


def layered_window(point: Mapping[str, AxisValue]) -> dict[str, Any]:
    """The fields of a window that begins at some layer."""
    return {
        "use_sliding_window": bool(point["window"]),
        "sliding_window": point["window"] or None,
        "max_window_layers": point["first_window"],
    }


def first_layer_window(config: Any) -> int | None:
    """The window of the first layer, where a configuration names the type of each."""
    return config.sliding_window if config.layer_types[0] == "sliding_attention" else None
