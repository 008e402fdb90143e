"""The norms of a program in the CPU library, and the rows of activations that they write."""

import ctypes
from collections.abc import Collection
from typing import Any

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.program import Linear, Norm


class NativeNorms:
    """Records the norms of the residual, and owns the rows that they write."""

    def __init__(
        self, library: ctypes.CDLL, memory: NativeMemory, config: ModelConfig, max_num_tokens: int, residual: int
    ) -> None:
        """`residual` is the address of float32 [tokens, hidden_size]."""
        self._library, self._memory, self._config = library, memory, config
        self._max_num_tokens, self._residual = max_num_tokens, residual
        self._rows: dict[tuple[ActivationForm, int], native.NativeRows] = {}
        """By form and place: parallel layers read the results of two norms."""

    def rows(self, form: ActivationForm, slot: int = 0) -> native.NativeRows:
        """The output of norms in a form. Norms write several if the matrices after them need several."""
        if (form, slot) not in self._rows:
            self._rows[form, slot] = self._memory.rows(self._max_num_tokens, self._config.hidden_size, form)
        return self._rows[form, slot]

    def emit_before(
        self, program: int, norm: Norm | None, linear: Linear, slot: int = 0, written: Collection[ActivationForm] = ()
    ) -> set[ActivationForm]:
        """Record the norm before a matmul, in every form that its matrices need and that is not in `written`. Returns
        these forms."""
        forms = dict.fromkeys(self._memory.form(matrix) for matrix in linear.matrices)
        for form in forms:
            if form not in written:
                self.emit(program, form, norm, slot=slot)
        return set(forms)

    def emit(
        self, program: int, form: ActivationForm, norm: Norm | None, *, slot: int = 0, sampled: bool = False
    ) -> None:
        """Record a norm in one form, of all tokens or of those that are sampled."""
        size, rows = self._config.hidden_size, self.rows(form, slot)
        if norm is not None and self._config.norm == "rms":
            weight = self._memory.vector(norm.weight)
            self._library.program_norm(program, rows, form, self._residual, weight, size, self._eps(norm), sampled)
        else:
            self._library.program_any_norm(program, rows, form, self._residual, self.native_norm(norm), size, sampled)

    def native_norm(self, norm: Norm | None) -> Any:
        """A norm of any kind as the library takes it; None stands for one that does nothing."""
        if norm is None:
            return ctypes.byref(native.NativeNorm(native.NORM_KINDS["none"], None, None, 0.0))
        bias = None if norm.bias is None else self._memory.vector(norm.bias)
        kind = native.NORM_KINDS[self._config.norm]
        return ctypes.byref(native.NativeNorm(kind, self._memory.vector(norm.weight), bias, self._eps(norm)))

    def _eps(self, norm: Norm) -> float:
        return self._config.rms_norm_eps if norm.eps is None else norm.eps
