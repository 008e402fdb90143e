"""The torch sampler: any mix of rows, each sampled from its own distribution."""

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.kernels.sampling.logits_processor_inputs import bits_of
from pipeline.kernels.sampling.logits_processors import apply_logits_processors
from pipeline.kernels.sampling.sample import probabilities_reference
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.select import select
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.sampler import Sampler
from pipeline.stages.execute.rows import RowTable
from tests.kernels.sampling.test_sample import assert_follows
from tests.slices import part_of

VOCAB_SIZE = 60
NUM_PROMPT, IDS = 4, np.array([3, 5, 5, 9, 11, 5, 11, 11], np.int32)
INF, NAN = float("inf"), float("nan")

FEATURES: list[dict[str, Any]] = [
    {},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.02},
    {"bias_ids": [1, 5, 30], "bias_values": [4.0, -2.0, 2.5]},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_p": 0.9},
    {"allowed_ids": np.array([1, 2, 5, 11, 40, 59], np.int32).tobytes(), "top_k": 4},
    {"bad_words_ids": [[11, 20], [21], [5, 11, 11, 22]], "min_tokens": 9, "stop_token_ids": [23], "min_p": 0.01},
]


def logits_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


class Rows:
    """One row for each of the options, all with the same ids."""

    def __init__(self, options: list[m.GenerationOptions]) -> None:
        num = len(options)
        self.table = RowTable(num, 64, 1, VOCAB_SIZE)
        self.sampling_inputs = SamplingInputs(num, VOCAB_SIZE)
        self.sampler = Sampler(select("cpu", torch.float32), self.sampling_inputs)
        self.rows: IntArray = np.arange(num, dtype=np.int32)
        for row, one in enumerate(options):
            self.table.add(row, 1, 0, IDS, np.zeros(0, np.int32), one, [2], -1, NUM_PROMPT)

    def sample(self, logits: torch.Tensor, indices: Any = None) -> np.ndarray:
        """Samples of the rows at these places, by default all."""
        self.table.fill_sampling_inputs(self.sampling_inputs, self.rows if indices is None else self.rows[indices])
        before = logits.clone()
        ids = self.sampler.sample(logits)
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
        return ids


@pytest.mark.parametrize("index", range(len(FEATURES)))
def test_samples_follow_the_sampling_options(index: int) -> None:
    """In this order: forbidden ids, bias, penalties, temperature, min_p, top_k, top_p."""
    options = m.GenerationOptions(temperature=1.3, **FEATURES[index])
    num, rounds = 400, part_of(20, 10)
    rows = Rows([m.GenerationOptions(**{**as_fields(options), "seed": seed}) for seed in range(num)])
    logits = logits_of(index)
    samples = []
    for _ in range(rounds):
        rows.table.keys += np.uint64(0x9E3779B97F4A7C15)
        samples.append(rows.sample(logits.expand(num, -1).clone()))
    processed = logits.clone()
    if (logits_processors := rows.table.logits_processors[0]) is not None:
        apply_logits_processors(processed, logits_processors, len(IDS))
    expected = probabilities_reference(processed, 1.3, options.top_k, options.top_p, options.min_p)
    assert_follows(torch.from_numpy(np.concatenate(samples)).long(), expected)


def as_fields(options: m.GenerationOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in m.GenerationOptions.__struct_fields__}


def test_rows_of_any_mix_have_the_same_samples_as_alone() -> None:
    options = [
        m.GenerationOptions(
            temperature=0.0 if i % 3 == 0 else 1.1, seed=i, num_logprobs=i % 4 if i % 2 == 0 else -1, **fields
        )
        for i, fields in enumerate(FEATURES * 3)
    ]
    rows = Rows(options)
    logits = torch.stack([logits_of(i) for i in range(len(options))])
    together = rows.sample(logits)
    token_outputs = rows.sampling_inputs.logprobs.memory.tobytes()
    alone, token_outputs_alone = [], b""
    for i in range(len(options)):
        alone += rows.sample(logits[i : i + 1], [i]).tolist()
        token_outputs_alone += rows.sampling_inputs.logprobs.memory.tobytes()
    assert together.tolist() == alone and token_outputs == token_outputs_alone
    greedy = [i for i, one in enumerate(options) if one.temperature == 0 and not FEATURES[i % len(FEATURES)]]
    assert [alone[i] for i in greedy] == logits[greedy].argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinite_logits(temperature: float) -> None:
    """NaN counts as -inf. The first of several infinitely likely ids is sampled, and none if none is possible."""
    texts = [[NAN, 1, NAN, -INF], [NAN] * 4, [-INF] * 4, [0, INF, 1, INF], [NAN, -INF, -3e38, NAN], [NAN, INF, 0, 0]]
    logits = torch.full((len(texts), VOCAB_SIZE), -INF)
    logits[:, 10:14] = torch.tensor(texts)
    rows = Rows([m.GenerationOptions(temperature=temperature, seed=i, top_p=0.9, top_k=3) for i in range(len(texts))])
    assert rows.sample(logits).tolist() == [11, -1, -1, 11, 12, 11]
    # Other rows of the batch are not affected.
    logits[1] = logits_of(4)
    expected = rows.sample(logits[1:2], [1]).tolist()
    assert rows.sample(logits).tolist() == [11, *expected, -1, 11, 12, 11]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_and_allowed_ids_are_combined(temperature: float) -> None:
    allowed = np.arange(20, 40, dtype=np.int32).tobytes()
    options = [
        m.GenerationOptions(temperature=temperature, compiled_grammar="any", allowed_ids=allowed, seed=i)
        for i in range(3)
    ]
    rows = Rows(options)
    for index, ids in enumerate(([10, 30], [10, 11], list(range(VOCAB_SIZE)))):
        rows.sampling_inputs.mask_words[index] = bits_of(np.array(ids, np.int32), VOCAB_SIZE)
    first, second, third = rows.sample(torch.stack([logits_of(i) for i in range(3)])).tolist()
    assert (first, second) == (30, -1) and 20 <= third < 40
