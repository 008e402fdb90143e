"""Sampling parameters of rows as the GPU stores them, with defaults for those that a test omits."""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.sampling.logits_processor_inputs import LogitsProcessors
from pipeline.kernels.sampling.noise_keys import sequence_key
from pipeline.kernels.triton.rows import NUM_FIELDS, Field


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    num_ids: int = 9
    ended: bool = False
    logits_processors: LogitsProcessors | None = None

    @property
    def key(self) -> int:
        return sequence_key(self.seed, 0)


def params_of(rows: list[Row]) -> torch.Tensor:
    """[R + 1, NUM_FIELDS] int32; the last row is padding."""
    params = np.zeros((len(rows) + 1, NUM_FIELDS), np.int32)
    floats = params.view(np.float32)
    params[:, Field.NUM_TOP] = params[:, Field.ALLOWED_AT] = -1
    for i, row in enumerate(rows):
        params[i, Field.NUM_IDS], params[i, Field.ENDED] = row.num_ids, row.ended
        params[i, Field.TOP_K] = row.top_k
        params[i, [Field.KEY_LOW, Field.KEY_HIGH]] = np.array([row.key], np.uint64).view(np.int32)
        floats[i, Field.TEMPERATURE], floats[i, Field.TOP_P], floats[i, Field.MIN_P] = (
            row.temperature,
            row.top_p,
            row.min_p,
        )
    params[-1, Field.ENDED] = 1
    return torch.from_numpy(params)


def list_memory_of(params: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """The lists of the rows' logits processors, one after the other; writes their positions into `params`."""
    words, floats = params.numpy(), params.numpy().view(np.float32)
    list_memory: list[np.ndarray] = [np.full(3, -99, np.int32)]

    def put(*arrays: np.ndarray) -> int:
        begin = sum(map(len, list_memory))
        list_memory.extend(array.view(np.int32) for array in arrays)
        return begin

    for i, row in enumerate(rows):
        if (logits_processors := row.logits_processors) is None:
            continue
        words[i, Field.HAS_LOGITS_PROCESSORS], words[i, Field.NUM_PROMPT] = 1, logits_processors.num_prompt
        floats[i, Field.REPETITION] = logits_processors.repetition
        floats[i, Field.PRESENCE] = logits_processors.presence
        floats[i, Field.FREQUENCY] = logits_processors.frequency
        words[i, Field.MIN_TOKENS] = logits_processors.min_tokens
        words[i, Field.ENDERS_AT], words[i, Field.NUM_ENDERS] = (
            put(logits_processors.enders),
            len(logits_processors.enders),
        )
        words[i, Field.BIAS_AT] = put(logits_processors.bias_ids, logits_processors.bias_values)
        words[i, Field.NUM_BIAS] = len(logits_processors.bias_ids)
        words[i, Field.RUNS_AT], words[i, Field.NUM_RUNS] = put(logits_processors.runs), logits_processors.num_runs
        if logits_processors.allowed is not None:
            words[i, Field.ALLOWED_AT] = put(logits_processors.allowed)
    return torch.from_numpy(np.concatenate(list_memory))
