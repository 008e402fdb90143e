"""A vision tower's program in the CPU library."""

import ctypes
from functools import partial
from typing import NamedTuple

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.patches import PatchInputs
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.stages.execute.cpu.native.memory import floats_at, rows_of, step_arrays
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.program import ProgramPlan
from pipeline.stages.execute.vision.builder import PatchWeights, ProjectorMatrix, TowerBuilder


class _Projector(NamedTuple):
    program: int
    given: tuple[int, int]
    """Address and width of its inputs."""
    out: tuple[int, int]
    """The same of its results."""


class NativeTower(NativeProgram, TowerBuilder):
    """The layers are those of an encoder; a projector is a program of its own, of other rows."""

    def __init__(self, library: ctypes.CDLL, isa: str, plan: ProgramPlan, patches: PatchInputs) -> None:
        super().__init__(library, isa, plan)
        self._patches = patches
        self._projectors: list[_Projector] = []

    def patches(self, weights: PatchWeights) -> None:
        library, memory, linear = self._library, self._memory, weights.linear
        num, width = self._patches.pixels.shape
        rows = memory.rows(num, width, ActivationForm.PLAIN)
        library.program_patches(self._handle, rows, self._patches.pixels.ctypes.data, width)
        packed = memory.pack(linear.matrices, bias=linear.bias)
        library.program_linear_add(self._handle, self._residual, rows, packed, self._config.hidden_size, 1.0)
        self._layers.norm_residual(weights.norm, "embed norm")

    def project(self, matrices: tuple[ProjectorMatrix, ...], max_num_rows: int) -> None:
        library, memory = self._library, self._memory
        program = library.program_new(self._thread_pool.handle, ctypes.byref(step_arrays(self._inputs)))
        width = matrices[0].linear.matrices[0].num_columns
        given = memory.floats(max_num_rows, width), width
        values, none = given[0], self._norms.native_norm(None)
        for matrix in matrices:
            (weight,) = matrix.linear.matrices
            form, outputs = memory.form(weight), weight.num_rows
            rows = memory.rows(max_num_rows, width, form)
            library.program_any_norm(program, rows, form, values, none, width, False)
            values = memory.floats(max_num_rows, outputs)
            if matrix.activation is None:
                packed = memory.pack((weight,), bias=matrix.linear.bias)
                library.program_linear(program, values, rows, packed, outputs)
            else:
                products = memory.products(matrix.linear, rows_of(range(outputs)), partial(_given, rows))
                kind, out = native.ACTIVATIONS[matrix.activation], native.NativeRows(values, outputs * 4)
                library.program_activate(
                    program, out, True, products, len(products), kind, outputs, native.NativeXieluForm()
                )
            width = outputs
        self._projectors.append(_Projector(program, given, (values, width)))

    def op_costs(self) -> FloatArray:
        flops: FloatArray = np.array([one for _, one, _ in self.costs()], np.float32)
        flops += flops.sum() / 1000  # some ops have none
        return flops

    def run_ops(self, first: int, end: int) -> None:
        inputs = self._inputs
        self._library.program_run_ops(self._handle, inputs.num_tokens, inputs.num_rows, first, end)

    def projected(self, rows: FloatArray, index: int = 0) -> FloatArray:
        program, (address, width), (found, num_outputs) = self._projectors[index]
        floats_at(address, len(rows), width)[:] = rows
        self._library.program_run(program, len(rows), 0, 0)
        return floats_at(found, len(rows), num_outputs)

    def close(self) -> None:
        while self._projectors:
            self._library.program_delete(self._projectors.pop().program)
        super().close()


def _given(rows: native.NativeRows, form: ActivationForm) -> native.NativeRows:
    """The rows, which are in this form."""
    return rows
