"""Decides the precision of activations before quantized weights: what `execute.activations = "auto"` means."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from pipeline.config.settings import Settings
from pipeline.kernels.cpu.isa import Isa
from pipeline.kernels.cpu.native import Activations
from pipeline.stages.execute.cpu.backend import Library
from pipeline.stages.execute.weights import Weights

AT_MOST_FIVE_BITS = ("q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k")
SIX_BITS = ("q6_k",)
LEAST_BYTES = 200_000_000
"""Of weights of few bits: about 350 million of them."""


def with_activations(settings: Settings, weights: Weights, library: Library | None) -> Settings:
    """The settings with the precision that "auto" stands for. The torch program has float activations."""
    if library is None:
        return settings
    chosen = choose_activations(settings.execute.activations, weights.format_bytes(), library.isa)
    execute = msgspec.structs.replace(settings.execute, activations=chosen)
    return msgspec.structs.replace(settings, execute=execute)


def choose_activations(
    setting: Literal["auto", "int12", "int8"], format_bytes: Mapping[str, int], isa: Isa
) -> Activations:
    """The precision of activations before weights of 4 to 6 bits. `format_bytes` are the bytes of the model's matrices
    of each format.

    Weights of at most five bits are rounded more coarsely than activations of 8 bits, which have a scale for each 32:
    "auto" is int8 if most weights of few bits are such. A file of Q6_K is chosen for the results of float weights, and
    gets int12. So do small models, which lose four times as much as one of 1.5 billion weights (docs/cpu.md) and
    are fast anyway, and AMX, which multiplies 12 bits as fast as 8.
    """
    if setting != "auto":
        return setting
    narrow = sum(format_bytes.get(format, 0) for format in AT_MOST_FIVE_BITS)
    wide = sum(format_bytes.get(format, 0) for format in SIX_BITS)
    return "int8" if narrow > wide and narrow + wide >= LEAST_BYTES and isa != "amx" else "int12"
