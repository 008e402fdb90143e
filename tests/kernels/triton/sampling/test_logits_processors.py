"""Logits change as in kernels/sampling/logits_processors.py, for any mix of rows. Rows without logits processors keep
theirs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.kernels.sampling.logits_processor_inputs import LogitsProcessors, bits_of, num_words
from pipeline.kernels.sampling.logits_processors import apply_logits_processors as apply_in_torch
from pipeline.kernels.sampling.logits_processors import mask
from pipeline.kernels.triton.rows import Field
from pipeline.kernels.triton.sampling.logits_processors import (
    MASK_WORDS,
    RUN,
    RUNS,
    TILE,
    LogitsProcessorScratch,
    apply_logits_processors,
)
from tests.kernels.cpu.sampling.test_logits_processors import Case, cases, row
from tests.kernels.triton.params import Row, list_memory_of, params_of
from tests.slices import part_of

INF = float("inf")

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


def check(logits: torch.Tensor, rows: list[Row], allowed: list[list[int] | None] | None = None) -> torch.Tensor:
    """Run the logits processors of these rows on logits [N, V]; a grammar may mask some of them. The last row of logits
    and the last sample are padding. Returns the new logits."""
    vocab_size, num = logits.shape[1], len(rows)
    logits = torch.cat([logits, torch.ones(1, vocab_size)])
    params = params_of(rows)
    list_memory = list_memory_of(params, rows)
    ids = torch.zeros(
        num + 1,
        max((len(row.logits_processors.ids) for row in rows if row.logits_processors), default=1),
        dtype=torch.int32,
    )
    masks, masked = None, None
    if allowed is not None:
        masks = torch.full((num + 1, num_words(vocab_size)), 0x55, dtype=torch.int32)
        masked = torch.zeros(num + 1, dtype=torch.int32)
    expected = logits.clone()
    for i, each in enumerate(rows):
        bits = None
        if allowed is not None and masks is not None and masked is not None and (some := allowed[i]) is not None:
            bits = bits_of(np.array(some, np.int32), vocab_size)
            masks[i], masked[i] = torch.from_numpy(bits.view(np.int32)), 1
        if each.logits_processors is not None:
            ids[i, : len(each.logits_processors.ids)] = torch.from_numpy(each.logits_processors.ids)
        if each.ended:
            continue
        if bits is not None:
            mask(expected[i], bits)
        if each.logits_processors is not None:
            apply_in_torch(expected[i], each.logits_processors, each.num_ids, bits)
    scratch = LogitsProcessorScratch(num + 1, vocab_size, "cpu")
    samples = torch.arange(num + 1, dtype=torch.int32), params[:, Field.NUM_IDS].contiguous()
    apply_logits_processors(logits, params, list_memory, ids, *samples, masks, masked, scratch)
    np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=0)
    assert not scratch.counts.any(), "counts were not reset"
    return logits


def row_of(vocab_size: int, case: Case) -> Row:
    logits_processors, num_known = case.logits_processors(vocab_size)
    return Row(
        logits_processors=replace(logits_processors, enders=np.unique(logits_processors.enders)), num_ids=num_known
    )


def check_case(sized_case: tuple[int, Case], seed: int) -> None:
    vocab_size, one = sized_case
    logits = row(vocab_size, seed)
    [found, _] = check(torch.from_numpy(logits)[None], [row_of(vocab_size, one)])
    np.testing.assert_allclose(found, one.expected(logits), rtol=1e-6, atol=0)


@settings(max_examples=15, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_any_logits_processors_follow_their_definitions(sized_case: tuple[int, Case], seed: int) -> None:
    check_case(sized_case, seed)


def test_rows_have_their_own_logits_processors_and_others_are_unchanged() -> None:
    vocab_size = 32 * MASK_WORDS + 40
    rows = [
        Row(),
        row_of(vocab_size, Case(allowed=[3, 31, 32, 2047, 2048, vocab_size - 1], output=[3], presence=1.5)),
        replace(row_of(vocab_size, Case(allowed=[1], output=[2], frequency=1.5)), ended=True),
        row_of(vocab_size, Case(enders=[5, 7], min_tokens=3, output=[5], bias={7: 100.0, 9: -2.5})),
        row_of(vocab_size, Case(enders=[5, 7], min_tokens=3, output=[5, 5, 5], repetition=1.3)),
        Row(),
    ]
    logits = torch.from_numpy(np.stack([row(vocab_size, i) for i in range(len(rows))]))
    found = check(logits, rows)
    assert torch.equal(found[[0, 2, 5]], logits[[0, 2, 5]]) and (found[-1] == 1).all()
    check(logits, rows, [[1, 2, 2050], [3, 4, 2049], [2], None, [5, 6], None])


@pytest.mark.parametrize(
    ("allowed", "ends"), [([4, 40], True), ([40], True), ([4, 39], False), ([], True), ([0, 4, 40], False)]
)
def test_a_grammar_that_allows_only_an_end_overrides_min_tokens(allowed: list[int], ends: bool) -> None:
    one = row_of(70, Case(enders=[4, 40, 41], min_tokens=5, output=[1, 2]))
    found = check(torch.zeros(1, 70), [one], [allowed])
    assert (found[0] > -INF).nonzero()[:, 0].tolist() == (allowed if ends else sorted({*allowed} - {4, 40, 41}))


def test_a_bad_word_longer_than_one_block_of_comparisons() -> None:
    long = [i % 7 for i in range(2 * RUN + 3)]
    rows = [
        row_of(50, Case(prompt=[9], output=long[:-1], bad_words=[long, [1, 2], [8]])),
        row_of(50, Case(prompt=long[:5], output=long[5:-1], bad_words=[long, [3, 49]])),
        row_of(50, Case(prompt=[9], output=[*long[1:-1]], bad_words=[[0, *long[1:]], [long[-2], 48]])),
    ]
    found = check(torch.zeros(3, 50), rows)
    forbidden = [(each == -INF).nonzero()[:, 0].tolist() for each in found[:3]]
    assert forbidden == [sorted({8, long[-1]}), [], [48]]


def test_more_bad_words_than_are_compared_together_of_several_lengths() -> None:
    """Some of each group match, and some only in their last ids."""
    output = [i % 5 for i in range(RUN + 9)]
    words = []
    for i in range(2 * RUNS + 7):
        before = output[len(output) - i % (RUN + 6) :] if i % (RUN + 6) else []
        if before and i % 3:
            before = [5, *before[1:]]
        words.append([*before, 6 + i])
    one = Case(prompt=[9], output=output, bad_words=words)
    found = check(torch.zeros(1, 2 * RUNS + 20), [row_of(2 * RUNS + 20, one)])
    matching = [i for i in range(len(words)) if i % (RUN + 6) == 0 or i % 3 == 0]
    assert (found[0] == -INF).nonzero()[:, 0].tolist() == [6 + i for i in matching]


def test_many_ids_are_counted_once_each() -> None:
    rng = np.random.default_rng(8)
    known = rng.integers(0, 40, 2 * TILE + 100)
    # For example, placeholder ids of an image have no logit.
    known[[5, TILE + 7, -1]] = -1, 60, 2**31 - 1
    logits_processors = LogitsProcessors(
        known.astype(np.int32), TILE + 30, repetition=1.2, presence=0.5, frequency=0.01
    )
    check(torch.from_numpy(row(60))[None], [Row(logits_processors=logits_processors, num_ids=len(known))])


if __name__ == "__main__":
    settings(max_examples=part_of(500, 125), deadline=None)(given(cases(), st.integers(0, 1000))(check_case))()
