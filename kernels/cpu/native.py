"""The structs and numbers of the CPU library's interface; native_library.py has its functions."""

from ctypes import (
    Structure,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from enum import IntEnum
from typing import Any, Literal, Self

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.stored_matrix import Format

PANEL = 16
"""Adjacent outputs of a packed matrix; columns are padded to a multiple of it."""

MAX_HEAD_DIM = 512
"""Largest head_dim that the attention op is tested with."""

SPINS = 2000
"""Spins of a waiting thread before it sleeps: some tens of microseconds."""

HUGE_PAGE = 2 * 1024**2


class KVType(IntEnum):
    """The numbers of the KV cache: `KVType` in kv.h."""

    BF16 = 0
    INT8 = 1
    """With a bfloat16 scale for each token's keys, and one for its values, in each head."""


Activations = Literal["int12", "int8"]
"""Of weights with 4 to 6 bits."""

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


class ActivationForm(IntEnum):
    """The form of activations for a matmul."""

    PLAIN = 0
    BYTES = 1
    """8 bits and a scale for each group of 32."""
    WORDS = 2
    """16 bits and a scale for each group of 32."""
    SPLIT = 3
    """12 bits, the upper eight and the lower four in bytes of their own, for weights with 4 to 6 bits: a scale and sums
    for each group of 32."""
    BLOCKS = 4
    """16 bits, for K-quants: a scale for each block of 256, and sums for each group of 32."""


FORMATS = {
    "bf16": 0,
    "q8_0": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 4,
    "q5_1": 5,
    "q4_k": 6,
    "q5_k": 7,
    "q6_k": 8,
    "fp8": 9,
}
PANEL_LAYOUT = 1
"""Version of the panels' layout in `matrix.h`, for all formats; raise it with every change. Files keep panels."""
FLOAT_SOURCES = {"f32": 1, "f16": 2}
"""`Source` in pack.h: formats that become bf16 when they are packed."""


def panel_format(format: Format) -> Format:
    """The format of a matrix's panels."""
    return "bf16" if format in FLOAT_SOURCES else format


def form_for(format: Format, activations: Activations, *, in_blocks: bool = False) -> ActivationForm:
    """The form of activations for weights of a format. `activations` is the precision for weights with 4 to 6
    bits. With `in_blocks`, those for K-quants have a scale for each block, unless they have 8 bits."""
    match format:
        case "bf16" | "f32" | "f16" | "fp8":
            return ActivationForm.PLAIN
        case "q8_0":
            return ActivationForm.WORDS
        case "q4_k" | "q5_k" | "q6_k" if in_blocks and activations != "int8":
            return ActivationForm.BLOCKS
        case _:
            return ActivationForm.BYTES if activations == "int8" else ActivationForm.SPLIT


class NativeStepArrays(Structure):
    """`Step` in step.h: addresses of the arrays of `StepInputs`."""

    _fields_ = (
        ("tokens", c_int),
        ("rows", c_int),
        ("samples", c_int),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sampled", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("offsets", c_void_p),
        ("block_tables", c_void_p),
        ("max_blocks", c_int),
        ("adapters", c_void_p),
        ("num_adapted", c_void_p),
        ("key_ends", c_void_p),
        ("own_rows", c_void_p),
    )


class PackedMatrix(Structure):
    """`Matrix` in matrix.h."""

    _fields_ = (
        ("format", c_int),
        ("form", c_int),
        ("columns", c_int),
        ("depth", c_int),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("lines", c_void_p),
    )


class NativeRows(Structure):
    """`Rows` in matrix.h."""

    _fields_ = (("data", c_void_p), ("stride", c_size_t))


class NativeProduct(Structure):
    """`Product` in linear.h."""

    _fields_ = (("matrix", PackedMatrix), ("rows", NativeRows))


LORA_TARGETS = 3
"""Most projections of one matmul."""


class NativeLoraAdapter(Structure):
    """`LoraAdapter` in lora.h."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p * LORA_TARGETS),
        ("ranks", c_int * LORA_TARGETS),
        ("rank", c_int),
    )


class NativeLoraSite(Structure):
    """`LoraSite` in lora.h."""

    _fields_ = (
        ("adapters", c_void_p),
        ("shrunk", c_void_p),
        ("stride", c_int),
        ("num_targets", c_int),
        ("ends", c_int * LORA_TARGETS),
        ("interleaved", c_int),
        ("depth", c_int),
        ("next", c_void_p),
    )


class NativeKeyFactors(Structure):
    """`KeyFactors` in kv.h."""

    _fields_ = (("factors", c_void_p), ("inverses", c_void_p), ("query_squares", c_void_p))


class NativeLayerMemory(Structure):
    """`KV` in kv.h."""

    _fields_ = (
        ("data", c_void_p),
        ("heads", c_int),
        ("head_dim", c_int),
        ("type", c_int),
        ("center", c_void_p),
        ("factors", c_void_p),
        ("stride", c_size_t),
    )


class NativeBlocks(Structure):
    """`NativeBlocks` in copy.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("swap", c_void_p),
        ("num_layers", c_int),
        ("num_blocks", c_int),
        ("layer_bytes", c_size_t),
    )


class NativeHeadNorms(Structure):
    """`HeadNorms` in qkv.h."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("eps", c_float),
        ("layer", c_int),
        ("each", c_int),
        ("all", c_int),
        ("values", c_int),
    )


class NativeQueryOptions(Structure):
    """`QueryOptions` in qkv.h."""

    _fields_ = (("scale", c_float), ("growth", c_void_p))


class NativeHeadShare(Structure):
    """`HeadShare` in qkv.h."""

    _fields_ = (("queries", c_int), ("keys", c_int), ("first_query", c_int), ("first_key", c_int))


class NativeVocabShare(Structure):
    """`VocabShare` in program.h."""

    _fields_ = (("ranks", c_void_p), ("best", c_void_p), ("threads", c_int), ("first", c_int), ("size", c_int))


class NativeDeltaLayer(Structure):
    """`delta::Layer` in delta.h."""

    _fields_ = (
        *((name, c_int) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "tiled")),
        *((name, c_float) for name in ("beta", "eps")),
        *((name, c_void_p) for name in ("conv", "rates", "dt_bias", "norm", "places")),
        ("all_heads", c_int),
    )


class NativeRowStates(Structure):
    """`RowStates` in states.h."""

    _fields_ = (
        ("slots", c_void_p),
        ("slot", c_size_t),
        ("layer", c_size_t),
        ("reads", c_void_p),
        ("writes", c_void_p),
    )


class NativeScoreOptions(Structure):
    """`ScoreOptions` in attention.h."""

    _fields_ = (
        ("softcap", c_float),
        ("slopes", c_void_p),
        ("sinks", c_void_p),
        ("biases", c_void_p),
        ("reach", c_int),
    )


class NativeNorm(Structure):
    """`NormWeights` in norm.h."""

    _fields_ = (("kind", c_int), ("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class NativeFileTable(Structure):
    """`FileTable` in token_inputs.h."""

    _fields_ = (
        ("format", c_int),
        ("source", c_int),
        ("rows", c_void_p),
        ("layer_bytes", c_size_t),
        ("scale", c_float),
    )


NORM_KINDS = {"rms": 0, "layer": 1, "none": 2}
"""`NormKind` in norm.h."""
ACTIVATIONS = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "swiglu_oai": 5,
    "gelu_quick": 6,
    "xielu": 7,
}
"""`Activation` in activation.h."""


class NativeXieluForm(Structure):
    """`XieluForm` in activation.h."""

    _fields_ = (("positive", c_float), ("negative", c_float), ("linear", c_float), ("largest", c_float))


class NativeRouteOptions(Structure):
    """`RouteOptions` in experts.h."""

    _fields_ = (
        ("scoring", c_int),
        ("normalized", c_int),
        ("scale", c_float),
        ("selection_bias", c_void_p),
        ("groups", c_int),
        ("groups_per_token", c_int),
        ("best_of_group", c_int),
        ("factors", c_void_p),
        ("softcap", c_float),
    )


class NativeGatheredRows(Structure):
    """`GatheredRows` in experts.h."""

    _fields_ = (("source", NativeRows), ("target", NativeRows), ("bytes", c_size_t))


class NativeSharedExpert(Structure):
    """`SharedExpert` in experts.h."""

    _fields_ = (("out", c_void_p), ("logits", c_void_p), ("stride", c_int))


SCORINGS = {"softmax": 0, "sigmoid": 1}
"""`Scoring` in experts.h."""


class MaskTicket(Structure):
    """`MaskTicket` in sampler.h."""

    _fields_ = (("word", c_void_p), ("expected", c_uint32), ("timeout_ms", c_int32))


SAMPLING_ARRAYS = (
    "greedy",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "keys",
    "logits_processors",
    "num_known",
    "masks",
    "ids",
)


class NativeSamplingArrays(Structure):
    """`SamplingInputs` in sampler.h: addresses of the arrays of the Python `SamplingInputs`."""

    _fields_ = tuple((name, c_void_p) for name in (*SAMPLING_ARRAYS, "num_top", "logprobs", "given_ids"))

    @classmethod
    def of(cls, sampling_inputs: SamplingInputs) -> Self:
        logprobs = sampling_inputs.logprobs
        return cls(
            *(getattr(sampling_inputs, name).ctypes.data for name in SAMPLING_ARRAYS),
            *(array.ctypes.data for array in (logprobs.num_top, logprobs.addresses, logprobs.given_ids)),
        )


class NativeScoreArrays(Structure):
    """`Scores` in sampler.h: addresses of the arrays of `ScoreInputs`."""

    _fields_ = (("ids", c_void_p), ("num_top", c_void_p), ("logprobs", c_void_p))

    @classmethod
    def of(cls, scores: ScoreInputs) -> Self:
        logprobs = scores.logprobs
        return cls(scores.ids.ctypes.data, logprobs.num_top.ctypes.data, logprobs.addresses.ctypes.data)
