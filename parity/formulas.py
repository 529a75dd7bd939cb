"""The formulas of papers whose layers no library holds, written out a second time: slowly, entry by entry.

They share nothing with `reimpl` but the names of weights, not even a layer of torch, and read as the papers do. Their
own rounding is the yardstick, with sums in two orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "relu": lambda x: x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


class Formula(nn.Module):
    """A function of named weights. `shapes` says which there are."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.act = config, ACTS[config.hidden_act]
        for name, shape in self.shapes(config).items():
            *path, last = name.split(".")
            part: nn.Module = self
            for each in path:
                if each not in dict(part.named_children()):
                    part.add_module(each, nn.Module())
                part = part.get_submodule(each)
            part.register_parameter(last, nn.Parameter(torch.empty(shape)))

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        """The weights by their names on disk."""
        return {}

    def normed(self, x: Tensor, name: str) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * gain + bias over the last axis, of statistics in float32.

        `kernel` in the configuration says whether torch's own is taken, whose sums are in another order, and whether
        all vectors that share weights are multiplied at once.
        """
        gain, bias = self.get_parameter(f"{name}.weight"), self.get_parameter(f"{name}.bias")
        if self.config.kernel:
            return torch.layer_norm(x, gain.shape, gain, bias, self.config.layer_norm_eps)
        wide = x.float()
        centred = wide - wide.sum(-1, keepdim=True) / x.shape[-1]
        variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
        return (centred * (variance + self.config.layer_norm_eps) ** -0.5 * gain.float() + bias.float()).to(x.dtype)

    def affine(self, vector: Tensor, name: str, token: int | None = None) -> Tensor:
        """W v + b for one vector, [size] or [rows, size], by the weights of one token where each has its own."""
        own = slice(None) if token is None else token
        weight, bias = self.get_parameter(f"{name}.weight")[own], self.get_parameter(f"{name}.bias")[own]
        return vector @ weight.T + bias

    def two(self, vector: Tensor, up: str, down: str, token: int | None = None) -> Tensor:
        """W2 act(W1 v + b1) + b2."""
        return self.affine(self.act(self.affine(vector, up, token)), down, token)


def _norm_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _linear_shapes(name: str, size: int, out: int, *tokens: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (*tokens, out, size), f"{name}.bias": (*tokens, out)}


def _below(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{name}{each}": shape for each, shape in shapes.items()}


class MixerTokenMlp(Formula):
    """MLP-Mixer, equation 1, without norm and residual: for each channel i, W2 act(W1 X_{*,i})."""

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        up = _linear_shapes("up_proj", config.num_patches, config.tokens_mlp_dim)
        return up | _linear_shapes("down_proj", config.tokens_mlp_dim, config.num_patches)

    def forward(self, x: Tensor) -> Tensor:
        return self.by_column(x, "")

    def by_column(self, x: Tensor, at: str) -> Tensor:
        """That whose weights stand at a place."""
        parts = (f"{at}up_proj", f"{at}down_proj")
        if self.config.kernel:
            return self.two(x.mT, *parts).mT
        return torch.stack([self.two(x[:, :, i], *parts) for i in range(x.shape[2])], dim=2)


class MixerLayer(MixerTokenMlp):
    """MLP-Mixer, equation 1: U_i = X_i + W2 act(W1 norm(X)_i) by column, Y_j = U_j + W4 act(W3 norm(U)_j) by row."""

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        size = config.hidden_size
        channels = _linear_shapes("up_proj", size, config.channels_mlp_dim)
        channels |= _linear_shapes("down_proj", config.channels_mlp_dim, size)
        norms = _norm_shapes("token_norm", size) | _norm_shapes("channel_norm", size)
        tokens = MixerTokenMlp.shapes(config)
        return norms | _below("token_mixer.", tokens) | _below("channel_mixer.", channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, "")

    def layer(self, x: Tensor, at: str) -> Tensor:
        """The layer whose weights stand at a place."""
        u = x + self.by_column(self.normed(x, f"{at}token_norm"), f"{at}token_mixer.")
        h, parts = self.normed(u, f"{at}channel_norm"), (f"{at}channel_mixer.up_proj", f"{at}channel_mixer.down_proj")
        if self.config.kernel:
            return u + self.two(h, *parts)
        return torch.stack([u[:, j] + self.two(h[:, j], *parts) for j in range(x.shape[1])], dim=1)


class MlpMixer(MixerLayer):
    """MLP-Mixer, figure 1: every patch embedded, the layers, a norm, the mean over patches, a linear classifier."""

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        shapes = _linear_shapes("projection", config.patch_size, config.hidden_size)
        for index in range(config.num_hidden_layers):
            shapes |= _below(f"layers.{index}.", MixerLayer.shapes(config))
        shapes |= _norm_shapes("norm", config.hidden_size)
        return shapes | _linear_shapes("classifier", config.hidden_size, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.affine(x, "projection")
        for index in range(self.config.num_hidden_layers):
            h = self.layer(h, f"layers.{index}.")
        return self.affine(self.normed(h, "norm").sum(1) / h.shape[1], "classifier")


class RankTokenMixing(Formula):
    """RankMixer, equations 2 to 4: token h is Concat(x_1^h, ..., x_T^h)."""

    def forward(self, x: Tensor) -> Tensor:
        return mix_slices(x)


def mix_slices(x: Tensor) -> Tensor:
    """The same for [rows, T, D]."""
    tokens, width = x.shape[1], x.shape[2] // x.shape[1]
    mixed = [[x[:, t, h * width : (h + 1) * width] for t in range(tokens)] for h in range(tokens)]
    return torch.stack([torch.cat(slices, dim=1) for slices in mixed], dim=1)


class RankPerTokenFfn(Formula):
    """RankMixer, equations 6 and 7: v_t = f2_t(act(f1_t(s_t))), with weights of token t alone."""

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        up = _linear_shapes("per_token_up", config.hidden_size, config.intermediate_size, config.num_tokens)
        return up | _linear_shapes("per_token_down", config.intermediate_size, config.hidden_size, config.num_tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x, "")

    def ffn(self, x: Tensor, at: str) -> Tensor:
        """That whose weights stand at a place."""
        parts = (f"{at}per_token_up", f"{at}per_token_down")
        return torch.stack([self.two(x[:, t], *parts, token=t) for t in range(x.shape[1])], dim=1)


class RankMixerBlock(RankPerTokenFfn):
    """RankMixer, equations 1 and 5: S = norm(mixing(X) + X); Y = norm(ffn(S) + S); or with both norms in front."""

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        norms = _norm_shapes("token_norm", config.hidden_size) | _norm_shapes("channel_norm", config.hidden_size)
        return norms | _below("channel_mixer.", RankPerTokenFfn.shapes(config))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, "")

    def block(self, x: Tensor, at: str) -> Tensor:
        """The block whose weights stand at a place."""
        first, second, ffn = f"{at}token_norm", f"{at}channel_norm", f"{at}channel_mixer."
        if self.config.norm_first:
            s = mix_slices(self.normed(x, first)) + x
            return self.ffn(self.normed(s, second), ffn) + s
        s = self.normed(mix_slices(x) + x, first)
        return self.normed(self.ffn(s, ffn) + s, second)


class RankMixer(RankMixerBlock):
    """RankMixer, section 3.1: block after block, then the mean over tokens."""

    @staticmethod
    def shapes(config: Any) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(config.num_hidden_layers):
            shapes |= _below(f"layers.{index}.", RankMixerBlock.shapes(config))
        return shapes

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.config.num_hidden_layers):
            x = self.block(x, f"layers.{index}.")
        return x.sum(1) / x.shape[1]
