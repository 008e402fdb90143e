"""Penalties change the logits of prompt and output ids by their definitions, and no others."""

import pytest
import torch

from pipeline.kernels.sampling.penalties import penalize


def penalized(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> list[float]:
    changed = torch.tensor(logits)
    ids = torch.tensor(prompt + output, dtype=torch.int32)
    penalize(changed, ids, len(prompt), repetition, presence, frequency)
    return changed.tolist()


def test_repetition_lowers_prompt_and_output_ids_once_for_either_sign() -> None:
    logits = [4.0, -4.0, 0.0, 3.0, 1.0]
    assert penalized(logits, [0, 0, 3], [1, 3, 2, 3], repetition=2.0) == [2.0, -8.0, 0.0, 1.5, 1.0]


def test_presence_lowers_each_output_id_once() -> None:
    assert penalized([1.0, 1.0, 1.0, 1.0], [0, 1], [1, 2, 2, 2], presence=0.5) == [1.0, 0.5, 0.5, 1.0]


def test_frequency_lowers_an_output_id_for_each_occurrence() -> None:
    assert penalized([1.0, 1.0, 1.0, 1.0], [0, 1], [1, 2, 2, 2], frequency=0.5) == [1.0, 0.5, -0.5, 1.0]


def test_the_repetition_penalty_comes_first() -> None:
    assert penalized([4.0], [], [0, 0], repetition=2.0, presence=0.25, frequency=1.0) == [-0.25]


def test_ids_outside_of_the_vocabulary_are_ignored() -> None:
    assert penalized([4.0, 2.0], [-1, 2, 99], [0, 5, -7], 2.0, 0.5, 0.5) == [1.0, 2.0]


def test_an_empty_history_changes_nothing() -> None:
    assert penalized([4.0, -2.0], [], [], 2.0, 0.5, 0.5) == [4.0, -2.0]


def test_an_impossible_id_stays_impossible() -> None:
    assert penalized([-torch.inf, 1.0], [0], [0], 1.5, -1.0, -1.0) == [-torch.inf, 1.0]


@pytest.mark.parametrize("num_prompt", [0, 40, 100])
def test_any_history_equals_counting_over_the_whole_vocabulary(num_prompt: int) -> None:
    generator = torch.Generator().manual_seed(num_prompt)
    logits = torch.randn(50, generator=generator) * 3
    ids = torch.randint(-3, 55, (100,), generator=generator)
    expected = logits.clone()
    for v in range(50):
        if v in ids:
            expected[v] = expected[v] / 1.2 if expected[v] > 0 else expected[v] * 1.2
        count = int((ids[num_prompt:] == v).sum())
        expected[v] -= 0.3 * count
        expected[v] -= 0.6 * (count > 0)
    penalize(logits, ids, num_prompt, 1.2, 0.6, 0.3)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
