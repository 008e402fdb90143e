"""From request results to statistics, on handmade results."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.bench.client import RequestResult
from pipeline.cli.bench.loop import Level
from pipeline.cli.bench.measure import Distribution, percentile, summarize
from pipeline.cli.bench.words import Calibration, prompt


def record(sent_s: float, arrivals: list[float], tokens: int | None = None, error: str | None = None) -> RequestResult:
    count = len(arrivals) if tokens is None else tokens
    return RequestResult(sent_s, arrivals[-1] if arrivals else sent_s, arrivals, 100, count, True, error)


def test_only_the_part_inside_the_window_counts() -> None:
    level = Level(
        2,
        10.0,
        20.0,
        [
            record(5.0, [6.0, 8.0, 10.0, 12.0]),  # starts before: two of its four tokens count
            record(12.5, [13.0, 15.0, 17.0]),  # within
            record(18.0, [19.0, 21.0], tokens=6),  # ends after: half of its six tokens count
        ],
    )
    summary = summarize(level)
    assert summary.output_tokens_per_s == pytest.approx((2 + 3 + 3) / 10)
    assert summary.total_tokens_per_s == pytest.approx((8 + 200) / 10)
    assert summary.num_requests == 2
    assert (summary.ttft_ms.count, summary.ttft_ms.p50) == (2, pytest.approx(750))
    assert (summary.itl_ms.count, summary.itl_ms.p50) == (4, pytest.approx(2000))
    assert (summary.tpot_ms.count, summary.tpot_ms.p50) == (2, pytest.approx(2000))
    assert summary.e2e_ms.max == pytest.approx(4500)
    assert summary.prefill_tokens_per_s == pytest.approx((200 + 100) / 2)
    assert (summary.prompt_tokens, summary.completion_tokens) == (100, 3.5)


def test_a_steady_stream_has_the_same_rate_in_any_window() -> None:
    records = [record(start, [start + 0.1 * step for step in range(1, 11)]) for start in map(float, range(100))]
    for opened_s in (3.0, 3.25, 3.77):
        summary = summarize(Level(1, opened_s, opened_s + 50, records))
        assert summary.output_tokens_per_s == pytest.approx(10, abs=0.03)


def test_errors_are_counted_and_give_no_tokens() -> None:
    level = Level(
        1, 0.0, 10.0, [record(1.0, [2.0], error="503: busy"), record(1.0, [], error="503: busy"), record(3.0, [4.0])]
    )
    summary = summarize(level)
    assert (summary.num_requests, summary.num_errors, summary.errors) == (1, 2, {"503: busy": 2})
    assert summary.output_tokens_per_s == pytest.approx(0.1)


def test_without_results_all_statistics_are_zero() -> None:
    summary = summarize(Level(1, 0.0, 0.0, []))
    assert (summary.output_tokens_per_s, summary.ttft_ms) == (0.0, Distribution())


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1), part=st.floats(0, 1))
def test_percentiles_are_within_the_range_and_increase(values: list[float], part: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, part) <= ordered[-1] or percentile(ordered, part) == pytest.approx(
        ordered[0]
    )
    assert (percentile(ordered, 0), percentile(ordered, 1)) == (ordered[0], ordered[-1])


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert percentile([1.0, 2.0, 4.0, 9.0], 0.5) == 3.0


@given(words=st.integers(1, 2000), shared=st.integers(0, 2000), seed=st.integers(0, 2**32))
def test_prompts_have_the_requested_length_a_shared_prefix_and_repeat(words: int, shared: int, seed: int) -> None:
    shared = min(shared, words - 1)
    first, second = (prompt(seed, name, words, shared).split() for name in ("8/1/0", "8/1/1"))
    assert len(first) == words
    assert first[:shared] == second[:shared]
    assert prompt(seed, "8/1/0", words, shared).split() == first


def test_no_two_prompts_are_alike() -> None:
    prompts = {prompt(1, f"{stream}/{count}", 128, 64) for stream in range(32) for count in range(32)}
    assert len(prompts) == 1024


@given(per_prompt=st.integers(0, 100), per_word=st.integers(1, 3), tokens=st.integers(200, 5000))
def test_calibration_finds_the_number_of_words(per_prompt: int, per_word: int, tokens: int) -> None:
    counted = (per_prompt + 16 * per_word, per_prompt + 116 * per_word)
    words = Calibration.between((16, 116), counted).words_for(tokens)
    assert abs(per_prompt + per_word * words - tokens) <= per_word
