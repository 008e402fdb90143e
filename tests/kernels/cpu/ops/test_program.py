"""A program's profile, and its results in every step."""

import ctypes

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.matrix import Matrix
from tests.kernels.cpu.quantized import random, random_matrix
from tests.kernels.cpu.recording import Recording, recording


def test_a_profile_names_every_op_and_its_cost(library: ctypes.CDLL) -> None:
    matrix = random_matrix(26, 48, 64, "q4_0")
    with recording(library, threads=2) as r:
        rows, residual = r.rows(5, 64), r.floats(np.zeros((5, 48)))
        r.put(rows, random(27, 5, 64), ActivationForm.BYTES)
        library.program_quantize(r.program, rows, ActivationForm.BYTES, r.floats(random(28, 5, 64)).ctypes.data, 64)
        library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 48, 1.0)
        r.tokens(5)
        seconds = np.full(2, np.nan)
        assert library.program_size(r.program) == 2
        assert library.program_profile(r.program, 5, 5, 5, seconds.ctypes.data) == 0
        assert [library.program_name(r.program, i) for i in range(2)] == [b"quantize", b"linear_add"]
        assert (seconds >= 0).all() and (seconds < 10).all()
        cost = (ctypes.c_double * 3)()
        library.program_cost(r.program, 1, 5, 5, 5, cost)
    # 48 rows of two groups of 18 bytes, and float32 input and output of five tokens.
    assert list(cost) == [48 * 2 * 18 + 5 * (64 + 48) * 4, 2 * 5 * 48 * 64, 1]


def test_a_program_repeats_its_results_in_every_step(library: ctypes.CDLL) -> None:
    """Many short steps on more threads than there are cores: no state carries over to the next step."""
    matrix = random_matrix(30, 512, 64, "bf16")
    with recording(library, threads=4) as r:
        rows, residual = r.rows(7, 64), r.floats(np.zeros((7, 512)))
        repeat(r, rows, residual, matrix)


def repeat(r: Recording, rows: native.NativeRows, residual: np.ndarray, matrix: Matrix) -> None:
    r.put(rows, random(31, 7, 64), ActivationForm.PLAIN)
    r.library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 512, 1.0)
    r.tokens(7)
    assert r.run() == 0
    first = residual.copy()
    for _ in range(300):
        residual[:] = 0
        assert r.run() == 0
        np.testing.assert_array_equal(residual, first)
