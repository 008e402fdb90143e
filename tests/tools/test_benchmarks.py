"""The pure parts of tools/benchmarks: loads, statistics, comparisons, verdicts."""

import argparse
import random
from typing import Any

import msgspec
import pytest

from pipeline.cli.bench.client import RequestResult
from pipeline.cli.bench.words import Calibration
from tools.benchmarks import long_prompt, memory, overload, pairs, report, watch
from tools.benchmarks.loads import BenchmarkLoad, Span, ask_of, span
from tools.benchmarks.pairs import Comparison, Ratio, compare, num_outside, order_of
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.scheduler_alone import request_cost

LOAD = BenchmarkLoad(16, Span(700, 1200), Span(128, 256), 10.0, "seed")


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"json": None, "seed": 1, "set": [], "check": False} | given))


def record(
    sent_s: float = 0.0, ended_s: float = 1.0, arrivals: tuple[float, ...] = (), error: str | None = None
) -> RequestResult:
    return RequestResult(sent_s, ended_s, list(arrivals), 10, len(arrivals), True, error)


# ----------------------------------------------------------------------------------------------------------- loads


def test_a_request_is_the_same_for_the_same_name_and_no_two_share_a_prefix() -> None:
    one_to_one = Calibration(0.0, 1.0)
    requests = [ask_of(LOAD, str(number), one_to_one) for number in range(50)]
    assert requests == [ask_of(LOAD, str(number), one_to_one) for number in range(50)]
    assert len({tuple(request.prompt.split()[:4]) for request in requests}) == 50
    assert all(700 <= len(request.prompt.split()) <= 1200 and 128 <= request.max_tokens <= 256 for request in requests)
    assert len({request.max_tokens for request in requests}) > 10
    other = msgspec.structs.replace(LOAD, seed="other")
    assert ask_of(other, "0", one_to_one).prompt != requests[0].prompt


def test_a_part_of_an_output_has_at_least_one_token() -> None:
    whole, part, least = (ask_of(LOAD, "x", Calibration(0.0, 1.0), part).max_tokens for part in (1.0, 0.5, 1e-9))
    assert part == round(whole / 2)
    assert least == 1


def test_a_span_is_parsed_from_an_option() -> None:
    assert span("700-1200") == Span(700, 1200)
    assert span("64") == Span(64, 64)
    for wrong in ("", "-", "1200-700", "0-4", "4-", "a-b", "-4"):
        with pytest.raises(argparse.ArgumentTypeError):
            span(wrong)


def test_memory_is_a_share_of_the_load_and_fits_its_longest_request() -> None:
    kv_bytes, swap_bytes = memory.sizes(LOAD, 0.25, block_bytes=1000.0, block_size=16)
    assert kv_bytes == round(0.25 * 16 * (950 + 192) / 16 * 1000)
    assert swap_bytes == round(16 * (950 + 192) / 16 * 1000)
    tight, _ = memory.sizes(LOAD, 0.001, block_bytes=1000.0, block_size=16)
    assert tight >= (1200 + 256) / 16 * 1000


def test_arrivals_have_the_rate_and_variance_of_a_poisson_process() -> None:
    moments = overload.arrivals_of("seed", 100.0, 200.0)
    assert moments == sorted(moments) and moments[0] > 0 and moments[-1] < 200
    assert len(moments) == pytest.approx(20_000, rel=0.03)
    counts = [sum(second <= moment < second + 1 for moment in moments) for second in range(200)]
    mean = sum(counts) / 200
    variance = sum((count - mean) ** 2 for count in counts) / 200
    assert 0.7 < variance / mean < 1.4  # 0 for even arrivals, larger for bursts


# ------------------------------------------------------------------------------------------------------ statistics


def test_arms_alternate_in_going_first() -> None:
    seen: list[tuple[int, int]] = []

    def measure(arm: int, number: int) -> pairs.Reading:
        seen.append((arm, number))
        return {"tok/s": 100.0 + arm}

    comparison = compare(("a", "b"), 4, measure, lambda words: None)
    assert [arm for arm, _ in seen] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert [number for _, number in seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [order_of(number) for number in range(2)] == [(0, 1), (1, 0)]
    ratio = comparison.ratio("tok/s")
    assert ratio is not None and ratio.median == pytest.approx(1.01)


def test_a_ratio_is_taken_within_rounds() -> None:
    """The machine became twice as fast, so the arms' medians would mislead."""
    drifting = Comparison(("a", "b"), ([{"x": 10.0}, {"x": 20.0}, {"x": 40.0}], [{"x": 9.0}, {"x": 18.0}, {"x": 36.0}]))
    ratio = drifting.ratio("x")
    assert ratio == Ratio(0.9, 0.9, 0.9)


def test_a_ratio_to_zero_is_none() -> None:
    assert Comparison(("a", "b"), ([{"x": 0.0}], [{"x": 3.0}])).ratio("x") is None


def test_the_interval_contains_the_median_at_its_confidence_level() -> None:
    # From tables of the sign test; the k-th value from each end: k = 1 up to 8, 2 from 9, 3 from 12, 6 of 20.
    assert [num_outside(count) for count in (1, 2, 5, 6, 8, 9, 11, 12, 20)] == [0, 0, 0, 0, 0, 1, 1, 2, 5]


def test_the_interval_drops_the_allowed_extremes() -> None:
    ratio = Ratio.of([1.0, 9.0, 1.1, 0.1, 1.2, 1.3, 1.4, 1.05, 1.15])
    assert (ratio.low, ratio.high) == (1.0, 1.4)
    assert Ratio.of([1.0, 9.0]) == Ratio(5.0, 1.0, 9.0)


def test_the_sign_test_matches_coin_flips() -> None:
    rng = random.Random(3)
    num_held = 0
    for _ in range(2000):
        ratio = Ratio.of([rng.gauss(0, 1) for _ in range(9)])
        num_held += ratio.low <= 0 <= ratio.high
    assert 0.94 < num_held / 2000 < 1.0


# ------------------------------------------------------------------------------------------------------------ gaps


def test_quiet_gaps_are_outside_of_long_prompts() -> None:
    assert long_prompt.quiet_windows(1.0, [(2.0, 3.0), (5.0, 6.0)], 9.0) == [(1.0, 2.0), (3.0, 5.0), (6.0, 9.0)]
    assert long_prompt.quiet_windows(1.0, [(2.0, 9.5)], 9.0) == [(1.0, 2.0)]
    assert long_prompt.quiet_windows(1.0, [], 9.0) == [(1.0, 9.0)]


def test_a_gap_that_overlaps_a_prefill_is_not_quiet() -> None:
    streams = [[1.0, 1.5, 2.5, 2.75, 4.0, 4.25]]
    assert long_prompt.gaps_within(streams, [(1.0, 2.0), (3.0, 5.0)]) == [0.5, 0.25]
    assert long_prompt.gaps_ending_in(streams, [(2.0, 3.0)]) == [1.0, 0.25]


def test_tokens_per_second_are_over_the_whole_run() -> None:
    streams = [record(0.0, 10.0, (1.0, 1.1, 1.2, 6.0, 10.0)), record(0.5, 9.0, (1.0, 1.1, 8.0, 9.0))]
    reading = long_prompt.reading_of(long_prompt.Run(streams, [record(2.0, 5.0, (5.0,))], 1.0))
    assert reading["tokens"] == 3 * 10 + 5 + 4 + 1
    assert reading["tok/s"] == pytest.approx(40 / 10)
    assert reading["long TTFT ms"] == pytest.approx(3000)
    assert reading["ratio"] == pytest.approx(reading["ITL p99 prefill ms"] / reading["ITL p99 quiet ms"])


# -------------------------------------------------------------------------------------------------------- overload


def test_rejected_requests_are_not_failures_and_all_others_are() -> None:
    records = [
        record(arrivals=(0.5,)),
        record(error="503: the server is full"),
        record(error="500: oh"),
        record(error="the stream ended early", arrivals=(0.5,)),
        record(),
    ]
    refused, admitted, failed = overload.divide(records)
    assert (refused, admitted, failed) == (records[1:2], records[:1], records[2:])


def test_the_bound_of_ttft_is_a_full_queue() -> None:
    assert overload.ttft_bound_ms(64, 16, 8.0, 250.0) == 250 + 48 / 8 * 1000
    assert overload.ttft_bound_ms(16, 64, 8.0, 250.0) == 250  # every request has a row
    assert overload.ttft_bound_ms(64, 16, 0.0, 250.0) == float("inf")


def test_growing_memory_is_not_flat_and_warming_up_is_no_growth() -> None:
    megabyte = 10**6
    grown = [float(megabyte * min(100 + index, 130)) for index in range(160)]
    assert watch.flatness("x", grown, watch.SLACK_BYTES).is_flat
    leaking = [float(megabyte * (100 + index / 4)) for index in range(160)]
    found = watch.flatness("x", leaking, watch.SLACK_BYTES)
    assert not found.is_flat and found.most == leaking[-1]
    spike = [100.0 * megabyte] * 159 + [900.0 * megabyte]
    assert watch.flatness("x", spike, watch.SLACK_BYTES).is_flat
    assert not watch.flatness("fds", [10.0] * 20 + [30.0] * 20, watch.SLACK_FDS, 0).is_flat
    with pytest.raises(AssertionError):
        watch.flatness("x", [1.0, 2.0, 3.0], 0)


def test_a_watch_measures_this_process() -> None:
    import os

    with watch.Watch({"me": os.getpid()}, every_s=0.01) as seen:
        pass
    assert seen.samples[0].rss_bytes["me"] > 10**6 and seen.samples[0].num_fds["me"] > 2


# -------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("relation", "below", "at", "above"),
    [("<", True, False, False), ("<=", True, True, False), (">", False, False, True), (">=", False, True, True)],
)
def test_a_verdict_compares_a_value_with_its_bound(relation: str, below: bool, at: bool, above: bool) -> None:
    assert [Verdict("", value, relation, 2.0).is_met for value in (1.0, 2.0, 3.0)] == [below, at, above]
    assert not Verdict("", float("nan"), relation, 2.0).is_met


def test_a_missed_bound_is_an_error_only_with_check(capsys: pytest.CaptureFixture[str]) -> None:
    for check, value, code in ((False, 3.0, 0), (True, 3.0, 1), (True, 1.0, 0)):
        found = BenchmarkReport("x", options(check=check))
        found.verdicts.append(Verdict("speed", value, "<", 2.0))
        assert found.finish() == code
    assert "MISSED: speed" in capsys.readouterr().out


def test_failed_requests_are_shown_and_fail_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    found = BenchmarkReport("x", options(check=True))
    found.errors["500: oh [no]"] += 3
    assert found.finish() == 1
    assert "3 × 500: oh [no]" in capsys.readouterr().out


def test_the_json_has_every_reading_and_the_ratios(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    found = BenchmarkReport("x", options(json=str(path)))
    found.comparison("a title", Comparison(("a", "b"), ([{"tok/s": 10.0}], [{"tok/s": 12.0}])))
    found.verdicts.append(Verdict("speed", 1.2, ">", 1.0))
    assert found.finish() == 0
    written = msgspec.json.decode(path.read_bytes())
    assert written["a title"]["arms"] == {"a": [{"tok/s": 10.0}], "b": [{"tok/s": 12.0}]}
    assert written["a title"]["ratios"]["tok/s"]["median"] == pytest.approx(1.2)
    assert written["verdicts"][0]["is_met"] is True
    assert "1.200" in capsys.readouterr().out


def test_a_random_seed_is_chosen_if_none_is_given() -> None:
    assert report.with_seed(options(seed=7)).seed == 7
    seeds = {report.with_seed(options(seed=None)).seed for _ in range(5)}
    assert len(seeds) == 5


# ------------------------------------------------------------------------------------------------- the scheduler alone


@pytest.mark.parametrize("caching", [False, True])
def test_the_scheduler_alone_serves_all_its_requests(caching: bool) -> None:
    assert (
        0 < request_cost(caching, num_requests=8, num_rows=4, num_prompt=40, num_output=20, num_blocks=24, seed=1) < 1
    )
