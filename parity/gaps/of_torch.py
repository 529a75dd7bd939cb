"""Gaps of torch."""

from __future__ import annotations

from parity.gaps.gap import TORCH, Gap, Place, unpadded

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
    unpadded,
)

ENCODER_ZEROS = Gap(
    "encoder-zeros",
    "torch: nn.TransformerEncoder in eval, with norm_first=False and enable_nested_tensor",
    TORCH,
    "padded rows are zeros on the fast path, values on the slow one",
    "nested tensors leave them out, and fill up with zeros",
    _encoder,
    unpadded,
)
