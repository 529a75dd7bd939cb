"""PoolFormer: images in stages; pooling where attention was, group norm, a scale per channel."""

from __future__ import annotations

from typing import Any

from parity.family import Axis, Family, Kind, Layer, Point
from parity.tiny import sizes
from reimpl import poolformer
from reimpl.norm import GroupNorm

BLOCK = ("widths", "pool", "ratio", "act", "scaled")
PATCHES = ("channels", "widths", "patches")
AXES = (
    Axis("channels", (3, 1, 4), "channels of an image (num_channels)"),
    Axis("widths", ("6/10", "5/5", "8/3"), "channels of the stages (hidden_sizes)"),
    Axis("depths", ("1/1", "2/1", "1/3"), "layers of the stages"),
    Axis("patches", ("3-2-1/2-1-1", "7-4-3/3-2-1", "1-1-0/4-3-2"), "patch_sizes - strides - padding of the stages"),
    Axis("pool", (3, 1, 5), "pixels over which is averaged, both ways (pool_size)"),
    Axis("ratio", (4.0, 1.5, 1.0), "mlp_ratio"),
    Axis("act", ("gelu", "relu", "silu"), "hidden_act"),
    Axis("scaled", (True, False), "use_layer_scale"),
    Axis("labels", (5, 1), "labels (id2label)"),
)


def configure(point: Point) -> dict[str, Any]:
    """Keyword arguments of PoolFormerConfig for a point of the configuration space."""
    sizes_of_stages = [list(map(int, stage.split("-"))) for stage in str(point["patches"]).split("/")]
    patches, strides, padding = map(list, zip(*sizes_of_stages, strict=True))
    fields = {
        "num_channels": point["channels"],
        "hidden_sizes": _numbers(point["widths"]),
        "depths": _numbers(point["depths"]),
        "patch_sizes": patches,
        "strides": strides,
        "padding": padding,
        "num_encoder_blocks": 2,
        "pool_size": point["pool"],
        "mlp_ratio": point["ratio"],
        "hidden_act": point["act"],
        "use_layer_scale": point["scaled"],
        "id2label": {number: f"label {number}" for number in range(int(point["labels"]))},
    }
    return sizes.config("poolformer", **fields)


def _numbers(choice: Any) -> list[int]:
    return [int(number) for number in str(choice).split("/")]


def _first_width(config: Any) -> int:
    return config.hidden_sizes[0]


def _of_first_stage(config: Any) -> dict[str, Any]:
    """What the reference's layers are built with beside, or in place of, the configuration."""
    width = config.hidden_sizes[0]
    return {"hidden_size": width, "intermediate_size": int(width * config.mlp_ratio)}


def _image(name: str, reference: str, candidate: Any, at: str, axes: tuple[str, ...], **more: Any) -> Layer:
    return Layer(name, Kind.IMAGE, reference, candidate, at=at, axes=axes, causal=False, masks=False, **more)


LAYER = "poolformer.encoder.block.0.0."

FAMILY = Family(
    model_type="poolformer",
    axes=AXES,
    configure=configure,
    config=poolformer.PoolFormerConfig,
    turned=(),
    rules=poolformer.PoolFormerForImageClassification.weight_rules,
    implementations=({},),
    layers=(
        _image(
            "norm",
            "PoolFormerGroupNorm",
            lambda config: GroupNorm(config.hidden_sizes[-1]),
            "norm.",
            ("widths",),
            arguments=lambda config: {"num_channels": config.hidden_sizes[-1]},
            width=lambda config: config.hidden_sizes[-1],
        ),
        _image(
            "pooling",
            "PoolFormerPooling",
            lambda config: poolformer.PoolFormerPooling(config.pool_size),
            f"{LAYER}pooling.",
            ("widths", "pool"),
            arguments=lambda config: {"pool_size": config.pool_size},
            width=_first_width,
        ),
        _image(
            "block",
            "PoolFormerLayer",
            poolformer.PoolFormerLayer,
            LAYER,
            BLOCK,
            arguments=lambda config: {
                "config": config,
                "num_channels": config.hidden_sizes[0],
                "pool_size": config.pool_size,
                "drop_path": 0.0,
                **_of_first_stage(config),
            },
            width=_first_width,
        ),
        _image(
            "patches",
            "PoolFormerEmbeddings",
            poolformer.PoolFormerEmbeddings,
            "poolformer.encoder.patch_embeddings.0.",
            PATCHES,
            arguments=lambda config: {
                "hidden_size": config.hidden_sizes[0],
                "num_channels": config.num_channels,
                "patch_size": config.patch_sizes[0],
                "stride": config.strides[0],
                "padding": config.padding[0],
            },
            width=lambda config: config.num_channels,
        ),
        _image(
            "model",
            "PoolFormerModel",
            poolformer.PoolFormerModel,
            "poolformer.",
            (*PATCHES, *BLOCK[1:], "depths"),
            width=lambda config: config.num_channels,
        ),
        _image(
            "logits",
            "PoolFormerForImageClassification",
            poolformer.PoolFormerForImageClassification,
            "",
            (*PATCHES, *BLOCK[1:], "depths", "labels"),
            width=lambda config: config.num_channels,
        ),
    ),
)
