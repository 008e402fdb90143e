"""What the parts of a program's layers have in common in the CPU library.

norm ─► matmul that adapters may change ─► attention, or activation ─► barrier ─► matmul ─► residual ─► barrier
"""

import ctypes

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.lora.adapter_file import Target
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.lora import NativeLora
from pipeline.stages.execute.cpu.native.memory import PAIR, NativeMemory, rows_of
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.cpu.program import EncodedRows
from pipeline.stages.execute.layers.recurrent import recurrent_width
from pipeline.stages.execute.program import AnyMatrix, Linear, Norm
from pipeline.stages.execute.ranks.share import Share


class NativeLayers:
    """Counts the layers of one program, and records how each part of them ends: with a matmul whose results are added
    to the residual, and with barriers. Owns the memory before and after these matmuls."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: int,
        memory: NativeMemory,
        config: ModelConfig,
        max_num_tokens: int,
        residual: int,
        norms: NativeNorms,
        gathered: RankMemory,
        share: Share,
        lora: NativeLora | None,
        first_layer: int,
    ) -> None:
        """`residual` is the address of float32 [tokens, hidden_size]. `first_layer` is the number of the first layer
        in the model."""
        self._library, self._program, self._memory, self._config = library, program, memory, config
        self._residual, self._norms = residual, norms
        self._gathered, self._share, self._lora = gathered, share, lora
        self._first_layer = first_layer
        self.num = 0
        """Layers so far."""
        width = max(config.query_size, *config.inner_sizes, recurrent_width(config))
        self.wide = gathered.floats(max_num_tokens, -(-width // PAIR) * PAIR)
        """The address of what is quantized before a matmul."""
        self.branch = gathered.floats(max_num_tokens, config.hidden_size) if config.post_norms else 0
        """The address of what a norm changes before it is added to the residual; 0 if no norm does."""

    @property
    def last(self) -> int:
        """The layer that was recorded last, or -1."""
        return self._first_layer + self.num - 1 if self.num else -1

    def begin(self) -> int:
        """Record that a layer begins. Returns its place in this program."""
        index = self.num
        self._library.program_layer(self._program, self._first_layer + index)
        self.num += 1
        return index

    def barrier(self, what: str) -> None:
        """Record that all ranks have computed what was recorded before; `what` names the last of it."""
        self._gathered.barrier(self._program, what, self.last)

    def adapt(
        self, targets: tuple[Target, ...], linear: Linear, depth: int, slot: int, *, interleaved: bool = False
    ) -> None:
        """Let adapters change the matmul that is recorded next, which reads the results of the norm at `slot`."""
        if self._lora is not None:
            form = self._memory.form(linear.matrices[0])
            rows, layer = self._norms.rows(form, slot), self.num - 1
            self._lora.emit(self._program, layer, targets, rows, form, depth, interleaved=interleaved)

    def written(
        self, rows: native.NativeRows, width: int, matrix: AnyMatrix, first: int
    ) -> tuple[native.NativeRows, bool]:
        """The output rows of an op before a matmul from column `first` on, and whether they are floats that are
        quantized afterwards."""
        if self._memory.form(matrix) is ActivationForm.PLAIN:
            return native.NativeRows(rows.data + first * self._library.act_bytes(), rows.stride), False
        return native.NativeRows(self.wide + first * 4, width * 4), True

    def add(
        self,
        rows: native.NativeRows,
        width: int,
        linear: Linear,
        post_norm: Norm | None,
        targets: tuple[Target, ...],
        what: str,
        *,
        is_written: bool = False,
        scale: float = 1.0,
        stays: bool = False,
    ) -> None:
        """residual = (residual + post_norm(rows x matrix) * residual_multiplier) * scale, or, if it `stays`, branch =
        post_norm(rows x matrix). The rows come from what `written` returned, or are in the form of the matrix
        already."""
        (matrix,) = linear.matrices
        library, hidden, factor = self._library, self._config.hidden_size, self._config.residual_multiplier
        form = self._memory.form(matrix)
        if form is not ActivationForm.PLAIN and not is_written:
            library.program_quantize(self._program, rows, form, self.wide, width)
        if self._lora is not None and targets:
            self._lora.emit(self._program, self.num - 1, targets, rows, form, width)
        part = self._share.hidden
        packed = self._memory.pack(linear.matrices, rows_of(part), linear.bias)
        library.program_stride(self._program, hidden)
        if post_norm is None:
            assert scale == 1
            residual = self._residual + 4 * part.start
            library.program_linear_add(self._program, residual, rows, packed, len(part), factor)
            self.barrier(what)
            return
        library.program_linear(self._program, self.branch + 4 * part.start, rows, packed, len(part))
        self.barrier(what)
        if stays:
            self.norm_branch(post_norm)
        else:
            self.add_branch(post_norm, f"{what} norm", scale)

    def add_encoded(self, encoded: EncodedRows, layer: int) -> None:
        """residual += what rows of the encoder cache have for the positions behind a layer"""
        if (rows := encoded.rows) is not None:
            width, stride = self._config.hidden_size, rows.shape[1]
            first = rows.ctypes.data + 4 * (layer + 1) * width
            self._library.program_add_encoded(self._program, self._residual, width, first, stride)
        self.barrier("encoded")

    def norm_residual(self, norm: Norm | None, what: str) -> None:
        """residual = norm(residual)"""
        if norm is not None:
            native_norm = self._norms.native_norm(norm)
            self._library.program_add_norm(
                self._program, self._residual, None, native_norm, self._config.hidden_size, 1.0, 1.0
            )
            self.barrier(what)

    def norm_branch(self, norm: Norm, other: int | None = None) -> None:
        """branch = norm(branch), or branch += norm(other), float32 [tokens, hidden_size] at that address."""
        native_norm = self._norms.native_norm(norm)
        self._library.program_add_norm(
            self._program, self.branch, other, native_norm, self._config.hidden_size, 1.0, 1.0
        )

    def add_branch(self, post_norm: Norm, what: str, scale: float = 1.0) -> None:
        """residual = (residual + post_norm(branch) * residual_multiplier) * scale"""
        norm = self._norms.native_norm(post_norm)
        factor, hidden = self._config.residual_multiplier, self._config.hidden_size
        self._library.program_add_norm(self._program, self._residual, self.branch, norm, hidden, factor, scale)
        self.barrier(what)
