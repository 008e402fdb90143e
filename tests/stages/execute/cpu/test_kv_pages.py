"""Pages of the KV memory: those of the first blocks are there at once, the others are touched beside the steps."""

import ctypes
import mmap
from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from pipeline.stages.execute.cpu.kept_library import KeptLibrary
from pipeline.stages.execute.cpu.native.kv_pages import FIRST_BYTES, KVPages
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import settings
from tests.stages.execute.native_driver import write

WAIT_S = 60.0
LAYER_BYTES = 4 * native.HUGE_PAGE + 3 * mmap.PAGESIZE


@pytest.fixture(scope="module")
def library() -> CDLL:
    return native_library.load(build(available()[0], print))


def resident(array: native.ByteArray) -> int:
    """Bytes of whole pages that have memory."""
    pages = np.zeros(-(-len(array) // mmap.PAGESIZE), np.uint8)
    libc = CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert libc.mincore(array.ctypes.data, len(array), pages.ctypes.data) == 0
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


def layers(pool: native_library.ThreadPool, touched_bytes: int | None) -> list[native.ByteArray]:
    return [pool.allocate(LAYER_BYTES, touched_bytes=touched_bytes) for _ in range(3)]


def test_only_what_is_asked_for_is_touched_at_once(library: CDLL) -> None:
    pool = native_library.ThreadPool(library, 2)
    assert [resident(one) for one in layers(pool, 0)] == [0] * 3
    for one in layers(pool, FIRST_BYTES):
        assert FIRST_BYTES <= resident(one) <= 2 * FIRST_BYTES, "whole huge pages"
    assert [resident(one) for one in layers(pool, None)] == [LAYER_BYTES] * 3
    pool.close()


def test_the_rest_is_touched_in_the_background_and_keeps_its_bytes(library: CDLL) -> None:
    pool = native_library.ThreadPool(library, 1)
    memory = layers(pool, FIRST_BYTES)
    pages = KVPages(library, [one.ctypes.data for one in memory], LAYER_BYTES)
    pages.start(memory)
    written = np.random.default_rng(0).integers(0, 256, LAYER_BYTES, np.uint8)
    for one in memory:  # as steps do meanwhile
        one[:] = written
    assert pages.wait(WAIT_S)
    assert [resident(one) for one in memory] == [LAYER_BYTES] * 3
    assert all((one == written).all() for one in memory)
    pages.close()
    pool.close()


def test_touching_stops_when_it_is_closed(library: CDLL) -> None:
    pool = native_library.ThreadPool(library, 1)
    memory = layers(pool, 0)
    pages = KVPages(library, [one.ctypes.data for one in memory], LAYER_BYTES)
    pages.close()
    pages.start(memory)
    assert pages.wait(WAIT_S)
    assert [resident(one) for one in memory] == [0] * 3
    pool.close()


def test_small_layers_need_no_thread(library: CDLL) -> None:
    pages = KVPages(library, [1, 2], FIRST_BYTES)
    pages.start([])
    assert pages.wait(0.0)
    pages.close()


@pytest.mark.parametrize("wakes", [False, True])
def test_an_executor_touches_its_kv_cache_unless_it_wakes(tmp_path: Path, wakes: bool) -> None:
    write(tmp_path, checkpoints.config_of())
    kept = KeptLibrary(wakes=wakes)
    runner = CpuRunner(settings(dtype="bfloat16", kernels="auto", kv_mib=64), tmp_path, kept=kept)
    attention = runner.program._attention  # type: ignore[attr-defined]
    layer_bytes = attention._num_blocks * attention._unit_bytes
    assert layer_bytes > 4 * FIRST_BYTES
    assert attention.pages.wait(WAIT_S)
    for address in attention._units:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * layer_bytes).from_address(address))
        assert (resident(memory) == 0) if wakes else (resident(memory) >= layer_bytes)
    runner.close()
