"""Ops of models other than Llama's: activations, layer norms, norms of results, learned positions, factors."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.activations import activation_reference, xielu_reference
from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.matrix import quantize
from pipeline.kernels.rms_norm import layer_norm_reference, rms_norm_reference
from tests.kernels.cpu.quantized import EPS, exact, random, random_matrix, read_floats
from tests.kernels.cpu.recording import assert_near, recording

GATES = [-3e38, -1e4, -200.0, -88.0, -20.0, -5.5, -2.0, -0.5, -1e-3, 0.0, 1e-3, 0.7, 3.0, 9.0, 88.0, 1e4]


# "swiglu_oai" is only for experts: test_native_experts.py
@pytest.mark.parametrize("kind", [kind for kind in native.ACTIVATIONS if kind not in ("swiglu_oai", "xielu")])
@pytest.mark.parametrize("gated", [True, False])
def test_activations_of_any_size(library: ctypes.CDLL, kind: str, gated: bool) -> None:
    """Sixteen outputs whose values are biases."""
    ups = random(1, 16)
    number = native.ACTIVATIONS[kind]
    with recording(library) as r:
        rows, out = r.rows(1, 32), r.wide_rows(1, 64)
        r.put(rows, random(2, 1, 32), ActivationForm.PLAIN)
        if gated:
            order = [i for first in (0, 8) for i in (*range(first, first + 8), *range(16 + first, 24 + first))]
            weights = r.pack(quantize(torch.zeros(32, 32), "bf16"), order, np.concatenate([GATES, ups]))
            library.program_swiglu(r.program, out, True, r.products((weights, rows)), 1, number)
        else:
            weights = r.pack(quantize(torch.zeros(16, 32), "bf16"), bias=np.array(GATES))
            no_xielu = native.NativeXieluForm()
            library.program_activate(r.program, out, True, r.products((weights, rows)), 1, number, 16, no_xielu)
        r.tokens(1)
        assert r.run() == 0
        found = read_floats(out, 1, 16)[0].astype(np.float64)
    gates = torch.tensor(GATES).float()
    with np.errstate(over="ignore"):
        expected = activation_reference(gates, kind).numpy() * (ups.astype(np.float32) if gated else 1.0)
    fits = np.abs(expected) < 3e38
    np.testing.assert_allclose(found[fits], expected[fits], rtol=2e-6, atol=5e-7)
    assert not np.isnan(found).any()


def test_xielu(library: ctypes.CDLL) -> None:
    """Its factors are of the layer."""
    form = 0.8, 0.7, 0.5, -1e-6
    gates = np.array([*GATES[1:], -1e-7], np.float32)
    with recording(library) as r:
        rows, out = r.rows(1, 32), r.wide_rows(1, 64)
        r.put(rows, random(2, 1, 32), ActivationForm.PLAIN)
        weights = r.pack(quantize(torch.zeros(16, 32), "bf16"), bias=gates)
        products = r.products((weights, rows))
        number = native.ACTIVATIONS["xielu"]
        library.program_activate(r.program, out, True, products, 1, number, 16, native.NativeXieluForm(*form))
        r.tokens(1)
        assert r.run() == 0
        found = read_floats(out, 1, 16)[0].astype(np.float64)
    np.testing.assert_allclose(found, xielu_reference(torch.from_numpy(gates), *form).numpy(), rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("kind", ["rms", "layer", "none"])
@pytest.mark.parametrize("width", [30, 64, 226])
def test_norms_of_any_kind(library: ctypes.CDLL, kind: str, width: int) -> None:
    """Before a matmul, of a result that is added, and in place."""
    residual, weight, bias = random(3, 5, width, scale=4) + 2, random(4, width) + 1, random(5, width)
    result = random(6, 5, width, scale=3)
    with recording(library) as r:
        values = [r.floats(one).ctypes.data for one in (weight, bias)]
        norm = native.NativeNorm(native.NORM_KINDS[kind], *values, 1e-5)
        rows, total, in_place = r.rows(5, width), r.floats(residual), r.floats(residual)
        library.program_any_norm(
            r.program, rows, ActivationForm.PLAIN, r.floats(residual).ctypes.data, ctypes.byref(norm), width, 0
        )
        from_ = r.floats(result).ctypes.data
        library.program_add_norm(r.program, total.ctypes.data, from_, ctypes.byref(norm), width, 0.25, 1.0)
        library.program_add_norm(r.program, in_place.ctypes.data, None, ctypes.byref(norm), width, 1.0, 1.0)
        r.tokens(5)
        assert r.run() == 0
        plain = r.read_plain(rows, 5, width)

    def expected(values: np.ndarray) -> np.ndarray:
        x, w, b = (torch.from_numpy(one.astype(np.float32)) for one in (values, weight, bias))
        match kind:
            case "rms":
                return (rms_norm_reference(x, w, 1e-5) + b.double()).numpy()
            case "layer":
                return layer_norm_reference(x, w, b, 1e-5).numpy()
        return x.double().numpy()

    error = 64 * EPS * (np.abs(expected(residual)) + np.abs(weight) + np.abs(bias) + 4)
    assert_near(in_place, expected(residual), error)
    np.testing.assert_allclose(plain, expected(residual), rtol=2**-8, atol=1e-4)
    assert_near(total, residual + 0.25 * expected(result), error + EPS * np.abs(residual) + 64 * EPS * 4)


def test_embeddings_are_scaled_and_get_positions(library: ctypes.CDLL) -> None:
    table, positions = random_matrix(7, 20, 64, "bf16"), random_matrix(8, 12, 64, "bf16")
    with recording(library) as r:
        residual = r.floats(np.zeros((4, 64)))
        library.program_embed(r.program, residual.ctypes.data, r.pack(table), 2.5, None, 0)
        library.program_positions(r.program, residual.ctypes.data, r.pack(positions), 2, r.inputs.positions.ctypes.data)
        r.fill([(0, 3), (7, 1)])
        r.inputs.ids[:4] = [5, 19, 0, 7]
        assert r.run() == 0
    expected = exact(table)[[5, 19, 0, 7]] * np.float32(2.5) + exact(positions)[[2, 3, 4, 9]]
    np.testing.assert_allclose(residual, expected, rtol=1e-6, atol=1e-6)


def test_a_factor_of_a_result(library: ctypes.CDLL) -> None:
    matrix, before = random_matrix(9, 40, 64, "bf16"), random(10, 3, 40)
    with recording(library) as r:
        rows, residual, alone = r.rows(3, 64), r.floats(before), r.floats(np.zeros((3, 40)))
        r.put(rows, random(11, 3, 64), ActivationForm.PLAIN)
        packed = r.pack(matrix)
        library.program_linear(r.program, alone.ctypes.data, rows, packed, 40)
        library.program_linear_add(r.program, residual.ctypes.data, rows, packed, 40, 0.25)
        r.tokens(3)
        assert r.run() == 0
    np.testing.assert_array_equal(residual, before.astype(np.float32) + alone * np.float32(0.25))
