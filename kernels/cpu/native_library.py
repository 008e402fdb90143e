"""Loads the CPU library, and declares the functions of `program.cpp`.

Calls go through ctypes, which releases the GIL. Arrays are passed by address: the caller that records a program must
keep them alive as long as the program.
"""

import ctypes
import mmap
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.kernels.cpu import library_file
from pipeline.kernels.cpu.native import (
    HUGE_PAGE,
    SPINS,
    ByteArray,
    MaskTicket,
    NativeBlocks,
    NativeDeltaLayer,
    NativeFileTable,
    NativeGatheredRows,
    NativeHeadNorms,
    NativeHeadShare,
    NativeLayerMemory,
    NativeLoraSite,
    NativeNorm,
    NativeProduct,
    NativeQueryOptions,
    NativeRouteOptions,
    NativeRows,
    NativeRowStates,
    NativeSamplingArrays,
    NativeScoreArrays,
    NativeScoreOptions,
    NativeSharedExpert,
    NativeStepArrays,
    NativeVocabShare,
    NativeXieluForm,
    PackedMatrix,
)

ABI_VERSION = 35
"""Version of `program.cpp`; raise it with every change of its interface."""


class IsaUnavailableError(Exception):
    """The system does not let this process use an instruction set. The message says which."""


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
    "touch_later": (None, [c_void_p, c_int, c_size_t, POINTER(c_int)]),
    "copy_blocks": (None, [c_void_p, POINTER(NativeBlocks), c_void_p, c_void_p, c_int]),
    "act_bytes": (c_int, []),
    "prefers_blocks": (c_int, []),
    "activation_bytes": (c_size_t, [c_int, c_int]),
    "activation_rows": (c_int, [c_int]),
    "program_new": (c_void_p, [c_void_p, POINTER(NativeStepArrays)]),
    "program_delete": (None, [c_void_p]),
    "program_embed": (None, [c_void_p, c_void_p, POINTER(PackedMatrix), c_float, c_void_p, c_int]),
    "program_add_encoded": (None, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "program_positions": (None, [c_void_p, c_void_p, POINTER(PackedMatrix), c_int, c_void_p]),
    "program_patches": (None, [c_void_p, NativeRows, c_void_p, c_int]),
    "program_any_norm": (None, [c_void_p, NativeRows, c_int, c_void_p, POINTER(NativeNorm), c_int, c_int]),
    "program_add_norm": (None, [c_void_p, c_void_p, c_void_p, POINTER(NativeNorm), c_int, c_float, c_float]),
    "program_token_inputs": (
        None,
        [c_void_p, c_void_p, POINTER(NativeFileTable), POINTER(NativeNorm), c_int, c_int],
    ),
    "program_gate_inputs": (None, [c_void_p, NativeRows, c_int, c_void_p, c_void_p, c_int, c_int, c_int]),
    "program_norm": (None, [c_void_p, NativeRows, c_int, c_void_p, c_void_p, c_int, c_float, c_int]),
    "program_quantize": (None, [c_void_p, NativeRows, c_int, c_void_p, c_int]),
    "program_gate": (None, [c_void_p, NativeRows, c_int, c_void_p, c_void_p, *5 * [c_int]]),
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
    "program_use_entries": (None, [c_void_p, POINTER(NativeStepArrays), c_void_p]),
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
    "program_attention_plan": (c_void_p, [c_void_p, c_int, c_int, c_int, c_int]),
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
            *(c_void_p, POINTER(NativeDeltaLayer), POINTER(NativeRowStates)),
            *(c_void_p, c_void_p, c_void_p, c_void_p, NativeRows, c_int, c_void_p),
        ],
    ),
    "program_short_conv": (
        None,
        [c_void_p, POINTER(NativeRowStates), c_void_p, c_void_p, c_int, c_int, NativeRows, c_int],
    ),
    "program_lora": (None, [c_void_p, POINTER(NativeLoraSite), NativeRows, c_int]),
    "program_swiglu": (None, [c_void_p, NativeRows, c_int, POINTER(NativeProduct), c_int, c_int]),
    "program_activate": (None, [c_void_p, NativeRows, c_int, POINTER(NativeProduct), *3 * [c_int], NativeXieluForm]),
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
    "program_run_ops": (c_int, [c_void_p, c_int, c_int, c_int, c_int]),
    "program_sample_again": (c_int, [c_void_p, c_int, c_int, c_int]),
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

    def allocate(self, num_bytes: int, *, touched_bytes: int | None = None) -> ByteArray:
        """Zeroed memory aligned to a page, in huge pages if possible. Its first `touched_bytes`, by default all, are
        touched: no step waits for page faults there."""
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        touched = num_bytes if touched_bytes is None else min(touched_bytes, num_bytes)
        if touched:
            self.library.touch(self.handle, array.ctypes.data, touched)
        return array

    def close(self) -> None:
        if self.handle:
            self.library.thread_pool_delete(self.handle)
            self.handle = None
