"""From logits to ids in torch: greedy rows by their largest logit, the others by a draw whose noise is keyed."""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.draw_inputs import DrawInputs
from pipeline.kernels.noise import halves
from pipeline.kernels.sample import log_probabilities
from pipeline.kernels.select import Ops
from pipeline.kernels.step_inputs import IntArray


class Sampler:
    """Draws for any mix of rows; a batch that is all greedy costs one argmax."""

    def __init__(self, ops: Ops, draws: DrawInputs) -> None:
        self._ops = ops
        self.draws = draws

    def sample(self, logits: Tensor) -> IntArray:
        """The ids that `draws` asks for: logits [N, V], one row for each. Returns [N] int32."""
        draws, num = self.draws, len(logits)
        random = np.flatnonzero(draws.greedy[:num] == 0)
        if not len(random):
            return self._ops.argmax(logits).numpy().astype(np.int32)
        ids = np.empty(num, np.int32)
        greedy = np.flatnonzero(draws.greedy[:num])
        if len(greedy):
            ids[greedy] = self._ops.argmax(logits[torch.from_numpy(greedy)]).numpy()
            logits = logits[torch.from_numpy(random)]
        ids[random] = self._ops.sample(
            logits,
            torch.from_numpy(draws.temperature[random]),
            torch.from_numpy(draws.top_k[random]).long(),
            torch.from_numpy(draws.top_p[random]),
            torch.from_numpy(draws.min_p[random]),
            halves(draws.keys[random]),
        ).numpy()
        return ids

    def score(self, logits: Tensor, ids: IntArray) -> None:
        """Leave the log probabilities that `draws` asks for there: logits [N, V], ids [N]."""
        scored = np.flatnonzero(self.draws.scored[: len(ids)])
        drawn = torch.from_numpy(ids[scored]).long().to(logits.device)
        self.draws.logprobs[scored] = log_probabilities(logits[torch.from_numpy(scored)], drawn).cpu().numpy()
