"""What sampling reads of each sampled token of a step, and the ids that it leaves.

Arrays are allocated once and stay where they are, as those of `StepInputs`. Entry i belongs to the i-th sampled token.
"""

from typing import Any

import numpy as np

from pipeline.kernels.step_inputs import IntArray

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
AddressArray = np.ndarray[Any, np.dtype[np.uint64]]

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy; dividing by it would leave one candidate anyway."""


class DrawInputs:
    """How each id of a step is drawn. Shapes are [max_num_rows]."""

    def __init__(self, max_num_rows: int) -> None:
        self.greedy: np.ndarray[Any, np.dtype[np.uint8]] = np.ones(max_num_rows, np.uint8)
        """1 where the largest logit is taken as it is: no penalty, no mask, nothing drawn."""
        self.temperature: FloatArray = np.zeros(max_num_rows, np.float32)
        self.top_p: FloatArray = np.ones(max_num_rows, np.float32)
        self.min_p: FloatArray = np.zeros(max_num_rows, np.float32)
        self.top_k: IntArray = np.zeros(max_num_rows, np.int32)
        self.keys: AddressArray = np.zeros(max_num_rows, np.uint64)
        """Noise of this draw, see kernels/noise.py."""
        self.repetition: FloatArray = np.ones(max_num_rows, np.float32)
        self.presence: FloatArray = np.zeros(max_num_rows, np.float32)
        self.frequency: FloatArray = np.zeros(max_num_rows, np.float32)
        self.history: AddressArray = np.zeros(max_num_rows, np.uint64)
        """Address of the row's known ids, int32; 0 where no penalty is set."""
        self.num_prompt: IntArray = np.zeros(max_num_rows, np.int32)
        self.num_known: IntArray = np.zeros(max_num_rows, np.int32)
        self.masks: AddressArray = np.zeros(max_num_rows, np.uint64)
        """Address of the bits of allowed ids, uint32 words, lowest bit first; 0 where all are."""
        self.ids: IntArray = np.zeros(max_num_rows, np.int32)
        """Where a step leaves what it drew."""
        self.scored: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(max_num_rows, np.uint8)
        """1 where the log probability of what is drawn is asked for."""
        self.any_scored = False
        """Whether it is for any of the step's."""
        self.logprobs: FloatArray = np.zeros(max_num_rows, np.float32)
        """Where a step leaves those that were asked for."""
