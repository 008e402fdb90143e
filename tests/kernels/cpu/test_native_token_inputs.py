"""Inputs of each token for each layer in the CPU library, against their formulas in float64."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.activations import activation_reference
from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.matrix import Matrix, quantize
from pipeline.kernels.rms_norm import rms_norm_reference
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu.quantized import random
from tests.kernels.cpu.recording import recording

LAYERS, IDS, TOKENS, EPS = 3, 40, 37, 1e-5
FLOATS: dict[Format, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def table_of(format: Format, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a table as a file has them, [IDS, bytes], and their values [IDS, LAYERS * size]."""
    values = torch.from_numpy(random(1, IDS, LAYERS * size))
    if format in FLOATS:
        stored = values.to(FLOATS[format])
        # The library reads floats as bfloat16.
        return stored.view(torch.uint8).numpy(), stored.bfloat16().double().numpy()
    matrix: Matrix = quantize(values, format)
    return matrix.data.view(torch.uint8).reshape(IDS, -1).numpy(), matrix.dequantize(torch.float32).double().numpy()


@pytest.mark.parametrize(
    ("format", "size"), [("f32", 16), ("f16", 48), ("bf16", 32), ("q8_0", 32), ("q4_1", 64)], ids=str
)
def test_inputs_are_made_of_projections_and_rows_of_the_file(library: ctypes.CDLL, format: Format, size: int) -> None:
    stored, values = table_of(format, size)
    projected, weight = random(2, TOKENS, LAYERS * size, scale=3), random(3, size) + 1
    ids = np.random.default_rng(0).integers(0, IDS, TOKENS)
    with recording(library) as r:
        table = r.memory(stored.nbytes)
        table[:] = stored.reshape(-1)
        rows = (table.ctypes.data + np.arange(IDS, dtype=np.uint64) * np.uint64(stored.shape[1])).astype(np.uint64)
        inputs = r.floats(projected)
        file = native.NativeFileTable(
            native.FORMATS[native.panel_format(format)],
            native.FLOAT_SOURCES.get(format, 0),
            rows.ctypes.data,
            stored.shape[1] // LAYERS,
            2.5,
        )
        norm = native.NativeNorm(native.NORM_KINDS["rms"], r.floats(weight).ctypes.data, None, EPS)
        library.program_token_inputs(
            r.program, inputs.ctypes.data, ctypes.byref(file), ctypes.byref(norm), size, LAYERS
        )
        r.tokens(TOKENS)
        r.inputs.ids[:TOKENS] = ids
        assert r.run() == 0
        found = inputs.copy().reshape(TOKENS, LAYERS, size)
    x, w = torch.from_numpy(projected).view(-1, size), torch.from_numpy(weight)
    normed = rms_norm_reference(x, w, EPS).numpy().reshape(found.shape)
    expected = (normed + values[ids].reshape(found.shape) * 2.5) / 2**0.5
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu"])
def test_gates_are_multiplied_with_the_inputs_of_a_layer(library: ctypes.CDLL, kind: str) -> None:
    size, layer = 32, 1
    gates, inputs = random(4, TOKENS, size, scale=2), random(5, TOKENS, LAYERS * size)
    with recording(library) as r:
        out = r.rows(TOKENS, size)
        kept = r.floats(inputs)
        at = kept.ctypes.data + 4 * layer * size
        sizes = size, LAYERS * size, native.ACTIVATIONS[kind]
        library.program_gate_inputs(r.program, out, ActivationForm.PLAIN, r.floats(gates).ctypes.data, at, *sizes)
        r.tokens(TOKENS)
        assert r.run() == 0
        found = r.read_plain(out, TOKENS, size)
    own = inputs.reshape(TOKENS, LAYERS, size)[:, layer]
    expected = activation_reference(torch.from_numpy(gates), kind).numpy() * own
    np.testing.assert_allclose(found, expected, rtol=2e-6 if library.act_bytes() == 4 else 2**-8, atol=2e-6)
