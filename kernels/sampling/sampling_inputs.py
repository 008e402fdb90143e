"""The inputs of sampling for each sampled token of a step, and the sampled ids.

Arrays are allocated once and stay where they are, as those of `StepInputs`. Entry i belongs to the i-th sampled token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.kernels.sampling.logits_processor_inputs import LogitsProcessors, WordArray, num_words
from pipeline.kernels.sampling.logprob_inputs import AddressArray, FloatArray, LogprobInputs
from pipeline.kernels.step_inputs import IntArray, LongArray

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy; dividing by it would leave one candidate anyway."""

NO_ID = -1
"""The sampled id if no token can be sampled: every id is forbidden or has no probability."""

NO_INDICES: LongArray = np.zeros(0, np.int64)


class SamplingInputs:
    """Sampling parameters of a step. Shapes are [max_num_samples]. `mask_words` is memory for masks that another
    process writes."""

    def __init__(self, max_num_samples: int, vocab_size: int, mask_words: WordArray | None = None) -> None:
        self.greedy: np.ndarray[Any, np.dtype[np.uint8]] = np.ones(max_num_samples, np.uint8)
        """1 for the largest logit and nothing else; the arrays below are then not read."""
        self.temperature: FloatArray = np.zeros(max_num_samples, np.float32)
        self.top_p: FloatArray = np.ones(max_num_samples, np.float32)
        self.min_p: FloatArray = np.zeros(max_num_samples, np.float32)
        self.top_k: IntArray = np.zeros(max_num_samples, np.int32)
        self.keys: AddressArray = np.zeros(max_num_samples, np.uint64)
        """Noise key of this sample, see kernels/sampling/noise.py."""
        self.logits_processors: AddressArray = np.zeros(max_num_samples, np.uint64)
        """Address of the row's `LOGITS_PROCESSORS` (kernels/sampling/logits_processors.py); 0 where its logits are
        taken as they are."""
        self.num_known: IntArray = np.zeros(max_num_samples, np.int32)
        """Number of ids of the row; read if it has logits processors."""
        self.masks: AddressArray = np.zeros(max_num_samples, np.uint64)
        """Address of the bits that a grammar allows, which are in `mask_words`; 0 where there is no grammar."""
        shape = max_num_samples, num_words(vocab_size)
        self.mask_words: WordArray = np.zeros(shape, np.uint32) if mask_words is None else mask_words
        """[max_num_samples, ceil(V / 32)]; bit v % 32 of word v / 32 says whether id v is allowed. The owner of
        the grammars writes the rows in `masked` for each step, before the program's wait for them ends."""
        self.masked: LongArray = NO_INDICES
        """Places of the step's sampled tokens that a grammar masks."""
        self.ids: IntArray = np.zeros(max_num_samples, np.int32)
        """The ids that a step sampled; `NO_ID` if none can be sampled."""
        self.logprobs = LogprobInputs(max_num_samples)
        self.keeps_logits = False
        """No row is `greedy`, because all logits are requested."""
        self.rows: IntArray = np.zeros(0, np.int32)
        """The row of each sampled token; indexes `row_logits_processors`."""
        self.row_logits_processors: Sequence[LogitsProcessors | None] = ()
        assert self.mask_words.shape == shape and self.mask_words.flags.c_contiguous
        self._mask_addresses: AddressArray = (
            self.mask_words.ctypes.data + np.arange(max_num_samples, dtype=np.uint64) * self.mask_words.strides[0]
        ).astype(np.uint64)

    def mask(self, masked: "np.ndarray[Any, np.dtype[np.bool_]]") -> None:
        """Set the step's sampled tokens that have a grammar mask."""
        num = len(masked)
        self.masks[:num] = np.where(masked, self._mask_addresses[:num], np.uint64(0))
        self.masked = np.flatnonzero(masked)

    def unmask(self, num: int) -> None:
        """Set a step of `num` sampled tokens without grammar masks."""
        self.masks[:num] = 0
        self.masked = NO_INDICES

    def row_processors(self, i: int) -> LogitsProcessors | None:
        """The logits processors at the address in `logits_processors`, or None."""
        return self.row_logits_processors[self.rows[i]] if self.logits_processors[i] else None
