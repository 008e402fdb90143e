"""The CPU library of `program.cpp`, as Python calls it.

Calls go through ctypes, which releases the GIL. Arrays are passed by address: the caller that records a program must
keep them alive as long as the program.
"""

import ctypes
import mmap
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from pipeline.kernels.cpu import library_file
from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.stored_matrix import Format

ABI_VERSION = 23
"""Version of `program.cpp`; raise it with every change of its interface."""

PANEL = 16
"""Adjacent outputs of a packed matrix; columns are padded to a multiple of it."""

MAX_HEAD_DIM = 256
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


class IsaUnavailableError(Exception):
    """The system does not let this process use an instruction set. The message says which."""


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
        *((name, c_int) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, c_float) for name in ("beta", "eps")),
        *((name, c_void_p) for name in ("conv", "rates", "dt_bias", "norm")),
    )


class NativeDeltaState(Structure):
    """`delta::State` in delta.h."""

    _fields_ = (
        ("slots", c_void_p),
        ("slot", c_size_t),
        ("layer", c_size_t),
        ("reads", c_void_p),
        ("writes", c_void_p),
    )


class NativeScoreOptions(Structure):
    """`ScoreOptions` in attention.h."""

    _fields_ = (("softcap", c_float), ("slopes", c_void_p), ("sinks", c_void_p))


class NativeNorm(Structure):
    """`NormWeights` in norm.h."""

    _fields_ = (("kind", c_int), ("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


NORM_KINDS = {"rms": 0, "layer": 1, "none": 2}
"""`NormKind` in norm.h."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swiglu_oai": 5}
"""`Activation` in activation.h."""


class NativeRouteOptions(Structure):
    """`RouteOptions` in experts.h."""

    _fields_ = (("scoring", c_int), ("normalized", c_int), ("scale", c_float), ("selection_bias", c_void_p))


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


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "abi_version": (c_int, []),
    "prepare": (c_int, []),
    "thread_pool_new": (c_void_p, [c_int, c_int]),
    "thread_pool_delete": (None, [c_void_p]),
    "panel_bytes": (c_size_t, [POINTER(PackedMatrix)]),
    "pack": (None, [c_void_p, POINTER(PackedMatrix), c_void_p, c_void_p]),
    "pack_floats": (None, [c_void_p, POINTER(PackedMatrix), c_void_p, c_void_p, c_int]),
    "map_file": (c_void_p, [c_void_p, c_int, c_size_t]),
    "unmap_file": (None, [c_void_p, c_size_t]),
    "write_file": (c_int, [c_int, c_void_p, c_int, c_size_t, POINTER(c_int)]),
    "copy_file": (c_int, [c_void_p, c_int, c_void_p, c_size_t]),
    "touch": (None, [c_void_p, c_void_p, c_size_t]),
    "copy_blocks": (None, [c_void_p, POINTER(NativeBlocks), c_void_p, c_void_p, c_int]),
    "act_bytes": (c_int, []),
    "prefers_blocks": (c_int, []),
    "activation_bytes": (c_size_t, [c_int, c_int]),
    "activation_rows": (c_int, [c_int]),
    "program_new": (c_void_p, [c_void_p, POINTER(NativeStepArrays)]),
    "program_delete": (None, [c_void_p]),
    "program_embed": (None, [c_void_p, c_void_p, POINTER(PackedMatrix), c_float]),
    "program_positions": (None, [c_void_p, c_void_p, POINTER(PackedMatrix), c_int]),
    "program_any_norm": (None, [c_void_p, NativeRows, c_int, c_void_p, POINTER(NativeNorm), c_int, c_int]),
    "program_add_norm": (None, [c_void_p, c_void_p, c_void_p, POINTER(NativeNorm), c_int, c_float]),
    "program_norm": (None, [c_void_p, NativeRows, c_int, c_void_p, c_void_p, c_int, c_float, c_int]),
    "program_quantize": (None, [c_void_p, NativeRows, c_int, c_void_p, c_int]),
    "program_qkv": (
        None,
        [
            *(c_void_p, NativeRows, POINTER(NativeProduct), c_int, c_int, POINTER(NativeLayerMemory)),
            *(c_void_p, c_void_p, POINTER(NativeHeadNorms), POINTER(NativeQueryOptions), c_void_p),
        ],
    ),
    "program_qkv_rows": (
        None,
        [
            *(c_void_p, NativeRows, c_int, POINTER(NativeLayerMemory), c_void_p, c_void_p),
            *(POINTER(NativeHeadNorms), POINTER(NativeQueryOptions), c_void_p, POINTER(NativeHeadShare)),
        ],
    ),
    "program_use_tables": (None, [c_void_p, c_void_p, c_void_p]),
    "program_stride": (None, [c_void_p, c_int]),
    "program_use_ranks": (None, [c_void_p, POINTER(NativeVocabShare)]),
    "program_barrier": (None, [c_void_p, c_void_p, c_char_p, c_int]),
    "best_bytes": (c_size_t, [c_int, c_int]),
    "ranks_bytes": (c_size_t, [c_int]),
    "ranks_new": (c_void_p, [c_void_p, c_int, c_int, c_int, c_int]),
    "ranks_delete": (None, [c_void_p]),
    "ranks_set_timeout": (None, [c_void_p, c_int]),
    "ranks_announce": (None, [c_void_p, c_uint64]),
    "ranks_begin": (c_int, [c_void_p, c_uint64]),
    "ranks_publish": (None, [c_void_p, c_int]),
    "ranks_await_outcome": (c_int, [c_void_p]),
    "ranks_set_busy": (None, [c_void_p, c_int]),
    "ranks_waited_s": (c_double, [c_void_p, c_int]),
    "ranks_late": (c_char_p, [c_void_p, POINTER(c_int), POINTER(c_int)]),
    "board_bytes": (c_size_t, [c_int]),
    "board_new": (c_void_p, [c_void_p, c_int, c_int, c_int]),
    "board_delete": (None, [c_void_p]),
    "board_set_timeout": (None, [c_void_p, c_int]),
    "board_post": (None, [c_void_p, c_uint64]),
    "board_wait": (c_uint64, [c_void_p, c_int, c_uint64]),
    "board_set_busy": (None, [c_void_p, c_int]),
    "board_layer": (c_int, [c_void_p, c_int]),
    "board_waited_s": (c_double, [c_void_p]),
    "program_use_board": (None, [c_void_p, c_void_p]),
    "program_layer": (None, [c_void_p, c_int]),
    "program_attention_plan": (c_void_p, [c_void_p, c_int, c_int, c_int]),
    "program_attention": (
        None,
        [
            *(c_void_p, NativeRows, c_int, NativeRows, POINTER(NativeLayerMemory), c_void_p),
            POINTER(NativeScoreOptions),
        ],
    ),
    "program_linear_add": (None, [c_void_p, c_void_p, NativeRows, POINTER(PackedMatrix), c_int, c_float]),
    "program_linear": (None, [c_void_p, c_void_p, NativeRows, POINTER(PackedMatrix), c_int]),
    "program_products": (None, [c_void_p, c_void_p, POINTER(NativeProduct), c_int, c_int]),
    "program_delta": (
        None,
        [
            *(c_void_p, POINTER(NativeDeltaLayer), POINTER(NativeDeltaState)),
            *(c_void_p, c_void_p, c_void_p, c_void_p, NativeRows, c_int),
        ],
    ),
    "program_lora": (None, [c_void_p, POINTER(NativeLoraSite), NativeRows, c_int]),
    "program_swiglu": (None, [c_void_p, NativeRows, c_int, POINTER(NativeProduct), c_int, c_int]),
    "program_activate": (None, [c_void_p, NativeRows, c_int, POINTER(NativeProduct), c_int, c_int, c_int]),
    "program_route": (
        c_void_p,
        [
            *(c_void_p, c_void_p, c_int, POINTER(NativeRouteOptions), c_int, c_int, c_int),
            *(POINTER(NativeGatheredRows), c_int),
        ],
    ),
    "program_experts_gate_up": (
        None,
        [
            *(c_void_p, NativeRows, c_int, POINTER(NativeProduct), c_int, c_int, c_float, c_float),
            *(c_int, c_void_p),
        ],
    ),
    "program_experts_quantize": (None, [c_void_p, NativeRows, c_int, c_void_p, c_int, c_void_p]),
    "program_experts_down": (None, [c_void_p, c_void_p, NativeRows, POINTER(PackedMatrix), c_int, c_void_p]),
    "program_combine": (
        None,
        [
            *(c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, POINTER(NativeSharedExpert)),
            c_float,
        ],
    ),
    "program_logit_form": (None, [c_void_p, c_float, c_float]),
    "program_sample": (
        None,
        [
            c_void_p,
            NativeRows,
            POINTER(PackedMatrix),
            c_int,
            c_void_p,
            c_int,
            POINTER(MaskTicket),
            POINTER(NativeSamplingArrays),
        ],
    ),
    "program_score": (
        None,
        [c_void_p, NativeRows, POINTER(PackedMatrix), c_int, c_void_p, c_int, POINTER(NativeScoreArrays)],
    ),
    "program_run": (c_int, [c_void_p, c_int, c_int, c_int]),
    "program_profile": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p]),
    "program_size": (c_int, [c_void_p]),
    "program_name": (c_char_p, [c_void_p, c_int]),
    "program_cost": (None, [c_void_p, c_int, c_int, c_int, c_int, POINTER(c_double)]),
}


def load(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare its functions.

    Raises OSError if it can't be loaded (see library_file.py) or is not one of ours, and IsaUnavailableError if the
    system does not let it use its instructions.
    """
    return _declared(library_file.load(path), path)


def load_open(fd: int, path: Path) -> ctypes.CDLL:
    """The same of an open file, which errors call `path`."""
    return _declared(library_file.load_open(fd, path), path)


def _declared(library: ctypes.CDLL, path: Path) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{path} has no function {name}") from error
        function.restype = result
        function.argtypes = arguments
    if library.abi_version() != ABI_VERSION:
        raise OSError(f"{path} has interface {library.abi_version()}, not {ABI_VERSION}")
    if not library.prepare():
        raise IsaUnavailableError("the system does not let this process use the tile registers of AMX")
    return library


class ThreadPool:
    """The threads that compute. Its creator closes it after the last program."""

    def __init__(self, library: ctypes.CDLL, size: int, spins: int = SPINS) -> None:
        self.library = library
        self.size = size
        self.handle = library.thread_pool_new(size, spins)

    def allocate(self, num_bytes: int) -> ByteArray:
        """Zeroed memory aligned to a page, in huge pages if possible. All pages are touched here, so that a lack of
        memory shows at the start, and no step waits for page faults."""
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        self.library.touch(self.handle, array.ctypes.data, num_bytes)
        return array

    def close(self) -> None:
        if self.handle:
            self.library.thread_pool_delete(self.handle)
            self.handle = None
