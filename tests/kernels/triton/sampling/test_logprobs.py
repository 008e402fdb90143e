"""Logprob records contain what a sort of the whole vocabulary finds."""

import numpy as np
import pytest
import torch

from pipeline.kernels.triton.sampling.logprobs import LogprobScratch, given_logprobs, token_logprobs, top_logprobs
from pipeline.kernels.triton.sampling.sample import BLOCK
from pipeline.runtime.token_outputs import logprob_dtype
from tests.kernels.cpu.sampling.test_logprobs import expected

INF, NAN = float("inf"), float("nan")
UNTOUCHED = -7

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


def logprobs_of(logits: np.ndarray, ids: list[int], num_top: list[int], *, keep: bool) -> torch.Tensor:
    """The words of the records for logits [N, V]; other kernels overwrite the logits in between if `keep`."""
    num, vocab_size = logits.shape
    before = torch.from_numpy(logits.astype(np.float32))
    most = max(0, *num_top)
    out = torch.full((num, 1 + 2 * most), UNTOUCHED, dtype=torch.int32)
    scratch = LogprobScratch(num + 1, vocab_size, most, "cpu", keeps=keep)
    num_tops, tokens = torch.tensor(num_top, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32)
    seen = before.clone()
    top_logprobs(out, seen, num_tops, most, scratch, keep=keep)
    assert (out[:, 0] == UNTOUCHED).all() and torch.equal(seen.view(torch.int32), before.view(torch.int32))
    if keep:
        seen.fill_(NAN)
    token_logprobs(out, scratch.kept if keep else seen, tokens, num_tops, scratch)
    return out


def check(logits: np.ndarray, ids: list[int], num_top: list[int], *, keep: bool = False) -> None:
    out = logprobs_of(logits, ids, num_top, keep=keep)
    most = (out.shape[1] - 1) // 2
    for words, row, token, num in zip(out.numpy(), logits.astype(np.float32), ids, num_top, strict=True):
        if num < 0:
            assert (words == UNTOUCHED).all()
            continue
        reference = expected(row, max(token, 0), num)
        assert words[1 : 1 + num].tolist() == reference["top_ids"].tolist()
        floats = words.view(np.float32)
        np.testing.assert_allclose(floats[1 + most : 1 + most + num], reference["top_logprobs"], rtol=1e-6, atol=2e-6)
        if token < 0:
            assert words[0] == UNTOUCHED
        else:
            np.testing.assert_allclose(floats[0], reference["logprob"], rtol=1e-6, atol=2e-6)
        rest = np.append(words[1 + num : 1 + most], words[1 + most + num :])
        assert (rest == UNTOUCHED).all() and logprob_dtype(num).itemsize == 4 * (1 + 2 * num)


def normal(num: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num, vocab_size))


@pytest.mark.parametrize("keep", [False, True])
def test_rows_request_different_logprobs_or_none(keep: bool) -> None:
    check(normal(6, BLOCK + 77), [3, BLOCK + 76, 5, 0, -1, 9], [5, 0, -1, 20, 3, 1], keep=keep)


def test_of_equal_logits_the_lowest_ids_come_first() -> None:
    logits = np.stack([np.round(normal(1, 2 * BLOCK)[0] / 3), np.full(2 * BLOCK, -3.5)])
    logits[1, [5, BLOCK + 1]] = 0.0, -0.0
    check(logits, [0, BLOCK], [20, 40])


def test_the_thousand_most_likely_ids() -> None:
    check(normal(1, 3 * BLOCK), [7], [1024])


def test_a_vocabulary_with_fewer_ids_than_requested() -> None:
    check(normal(2, 7), [6, 2], [9, 40])


def test_given_ids_replace_the_most_likely_ones() -> None:
    """Each row gives different ids or none, in any order, some twice; their logprobs are those of a sort."""
    vocab_size = BLOCK + 77
    logits = normal(4, vocab_size).astype(np.float32)
    logits[2, 5] = NAN
    given = [[7, 3, BLOCK + 76, 3], [], [5, 9], list(range(40))]
    num_top = [4, 2, 2, 40]
    ids = np.full((4, 40), -1, np.int32)
    for row, each in enumerate(given):
        ids[row, : len(each)] = each
    natural = torch.tensor([0, 2, 0, 0], dtype=torch.int32)
    before, out = torch.from_numpy(logits), torch.full((4, 81), UNTOUCHED, dtype=torch.int32)
    scratch = LogprobScratch(4, vocab_size, 2, "cpu", keeps=False)
    top_logprobs(out, before, natural, 2, scratch, keep=False)
    given_logprobs(out, before, torch.from_numpy(ids), scratch)
    token_logprobs(out, before, torch.tensor([1, 2, 3, 4], dtype=torch.int32), natural, scratch)
    for words, row, token, each, num in zip(out.numpy(), logits, [1, 2, 3, 4], given, num_top, strict=True):
        reference = expected(row, token, vocab_size)
        of_id = dict(zip(reference["top_ids"].tolist(), reference["top_logprobs"].tolist(), strict=True))
        chosen = each or reference["top_ids"][:num].tolist()
        assert words[1 : 1 + num].tolist() == chosen
        found = words.view(np.float32)
        np.testing.assert_allclose(found[0], reference["logprob"], rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(found[41 : 41 + num], [of_id[one] for one in chosen], rtol=1e-6, atol=2e-6)
        assert (words[1 + num : 41] == UNTOUCHED).all() and (words[41 + num :] == UNTOUCHED).all()


def test_nan_logits_have_no_probability() -> None:
    logits = normal(5, BLOCK + 3)
    logits[0, ::2] = NAN
    logits[1] = -INF
    logits[2] = np.where(np.arange(BLOCK + 3) % 500 == 7, INF, logits[2])
    logits[3, 3:] = -INF
    logits[4] = np.where(logits[4] > 8, 3e38, -3e38)
    check(logits, [0, 1, 7, 2, 3], [4, 3, 8, 6, 5])


if __name__ == "__main__":
    rng = np.random.default_rng(1)
    for trial in range(24):
        size = int(rng.choice([1, 7, 63, 65, BLOCK, 3000, 9000]))
        spread = float(rng.choice([0, 0.1, 1, 5]))
        many = rng.normal(0, spread, (3, size))
        many = np.round(many) if trial % 3 == 0 else many
        many = np.where(rng.random(many.shape) < rng.choice([0, 0.5, 0.999]), rng.choice([NAN, -INF, INF, 1.0]), many)
        check(
            many,
            rng.integers(0, size, 3).tolist(),
            rng.choice([0, 1, 5, 20, 100, 1024], 3).tolist(),
            keep=trial % 2 == 0,
        )
        print(trial, size, spread)
