"""A program from the last norm to ids."""

import ctypes

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.matrix import Matrix
from tests.kernels.cpu.recording import Recording, form_of

DEPTH = 64
MASKS_LATE = 1


class Head:
    """LM head, wait for masks and sampler, over activations that a test sets."""

    def __init__(self, r: Recording, matrix: Matrix) -> None:
        self.r, self.matrix = r, matrix
        most = r.inputs.max_num_rows
        self.rows = r.rows(most, matrix.num_columns)
        self.logits = r.floats(np.zeros((most, matrix.num_rows)))
        self.ticket = r.kept(native.MaskTicket(None, 0, 0))
        r.library.program_sample(
            r.program,
            self.rows,
            r.pack(matrix),
            matrix.num_rows,
            self.logits.ctypes.data,
            most,
            ctypes.byref(self.ticket),
            ctypes.byref(native.NativeSamplingArrays.of(r.sampling_inputs)),
        )

    def put(self, activations: np.ndarray) -> None:
        """The activations of the step's sampled tokens, one per row."""
        self.kept = self.r.put(self.rows, activations, form_of(self.matrix.format))
        self.r.tokens(len(activations))

    def run(self, activations: np.ndarray) -> np.ndarray:
        """Returns the ids."""
        self.put(activations)
        self.r.sampling_inputs.ids[:] = -1
        assert self.r.run() == 0
        return self.r.sampling_inputs.ids[: len(activations)].copy()

    def all_logits(self, activations: np.ndarray) -> np.ndarray:
        self.r.sampling_inputs.greedy[:] = 0
        self.logits[:] = np.nan
        self.run(activations)
        self.r.sampling_inputs.greedy[:] = 1
        return self.logits[: len(activations)].copy()
