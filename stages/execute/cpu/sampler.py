"""Samples ids from logits in torch: greedy rows take the largest logit, the others use keyed noise."""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.sampling.logits_processors import apply_logits_processors, mask
from pipeline.kernels.sampling.logprobs import write_logprobs
from pipeline.kernels.sampling.noise import halves
from pipeline.kernels.sampling.sampling_inputs import GREEDY_BELOW, NO_ID, SamplingInputs
from pipeline.kernels.select import Ops
from pipeline.kernels.step_inputs import IntArray, LongArray


class Sampler:
    """Samples any mix of rows. A batch of greedy rows costs one argmax."""

    def __init__(self, ops: Ops, sampling_inputs: SamplingInputs) -> None:
        self._ops = ops
        self.sampling_inputs = sampling_inputs

    def sample(self, logits: Tensor) -> IntArray:
        """Sample an id for each row of logits [N, V], and write the logprobs that `sampling_inputs` requests. The
        logits are not modified. Returns [N] int32; `NO_ID` if no id can be sampled."""
        sampling_inputs, num = self.sampling_inputs, len(logits)
        others = np.flatnonzero(sampling_inputs.greedy[:num] == 0)
        if not len(others):
            return self._largest(logits)
        ids = np.empty(num, np.int32)
        plain = np.flatnonzero(sampling_inputs.greedy[:num])
        if len(plain):
            ids[plain] = self._largest(logits[torch.from_numpy(plain)])
        processed = logits[torch.from_numpy(others)]
        self._apply_logits_processors(processed, others)
        cold = sampling_inputs.temperature[others] < GREEDY_BELOW
        if cold.any():
            ids[others[cold]] = self._largest(processed[torch.from_numpy(cold)])
        if not cold.all():
            ids[others[~cold]] = self._drawn(processed[torch.from_numpy(~cold)], others[~cold])
        write_logprobs(logits, ids, sampling_inputs.logprobs)
        return ids

    def _apply_logits_processors(self, logits: Tensor, rows: LongArray) -> None:
        """Apply the logits processors of these rows, in place."""
        sampling_inputs = self.sampling_inputs
        for index in np.flatnonzero(
            (sampling_inputs.masks[rows] != 0) | (sampling_inputs.logits_processors[rows] != 0)
        ).tolist():
            row = int(rows[index])
            grammar = sampling_inputs.mask_words[row] if sampling_inputs.masks[row] else None
            if grammar is not None:
                mask(logits[index], grammar)
            if (processors := sampling_inputs.row_processors(row)) is not None:
                apply_logits_processors(logits[index], processors, int(sampling_inputs.num_known[row]), grammar)

    def _largest(self, logits: Tensor) -> IntArray:
        """The id of each row's largest logit. NaN counts as -inf."""
        ids = self._ops.argmax(logits)
        # argmax would take NaN for the largest.
        if not bool((logits.gather(1, ids[:, None]) > -torch.inf).all()):
            clean = _clean(logits)
            ids = self._ops.argmax(clean).masked_fill_(clean.amax(dim=-1) == -torch.inf, NO_ID)
        largest: IntArray = ids.cpu().numpy().astype(np.int32)
        return largest

    def _drawn(self, logits: Tensor, rows: LongArray) -> IntArray:
        """Sample each row with its temperature and filters at `rows`."""
        sampling_inputs = self.sampling_inputs
        finite = logits.amax(dim=-1).isfinite()
        if not bool(finite.all()):
            logits = _clean(logits)
            finite = logits.amax(dim=-1).isfinite()
        if not bool(finite.all()):
            # An infinite logit, or no valid one.
            ids = self._largest(logits)
            kept = finite.cpu().numpy()
            if kept.any():
                ids[kept] = self._drawn(logits[finite], rows[kept])
            return ids
        drawn: IntArray = (
            self._ops.sample(
                logits,
                torch.from_numpy(sampling_inputs.temperature[rows]),
                torch.from_numpy(sampling_inputs.top_k[rows]).long(),
                torch.from_numpy(sampling_inputs.top_p[rows]),
                torch.from_numpy(sampling_inputs.min_p[rows]),
                halves(sampling_inputs.keys[rows]),
            )
            .numpy()
            .astype(np.int32)
        )
        return drawn


def _clean(logits: Tensor) -> Tensor:
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
