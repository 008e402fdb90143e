"""Which steps encode an item, who holds its rows, and what becomes of them when sequences leave."""

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.sections.stages import ScheduleSettings
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.stages.schedule.media.spans import SHORT_TEXT
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import inline
from tests.stages.schedule.bench import Bench, config, media_item

ROWS = 40
FACTS = m.ExecuteFacts(100, 16, 512, 30000)


def prompt_of(*names: str, text: int = 4) -> tuple[list[int], list[m.MediaItem]]:
    """A prompt of images, each behind some text, and of text at the end."""
    prompt: list[int] = []
    media = []
    for name in names:
        prompt += range(100, 100 + text)
        media.append(media_item(name, (len(prompt), ROWS)))
        prompt += [3] * ROWS
    return [*prompt, *range(200, 210)], media


def bench_of(depth: int = 1, **changes: Any) -> Bench:
    return Bench(config(**({"num_encoder_rows": ROWS, "num_blocks": 200} | changes)), depth)


def admit(bench: Bench, *names: str, max_tokens: int = 4, text: int = 4, **others: Any) -> int:
    prompt, media = prompt_of(*names, text=text)
    return bench.admit(prompt, max_tokens, media=media, **others)


def num_encoded(bench: Bench) -> dict[str, int]:
    return {key.decode().rstrip("-"): num for key, num in bench.executor.num_encoded.items()}


def finish(bench: Bench) -> None:
    bench.run()
    bench.check()
    bench.check_outputs()
    assert bench.scheduler.media.cache.num_held == 0
    assert set(bench.finished) == set(bench.opened)


def test_an_item_is_encoded_by_the_step_that_computes_its_first_position() -> None:
    bench = bench_of(max_num_batched_tokens=16)
    bench.admit([*range(100, 120), *[3] * ROWS, 7], media=[media_item("a", (20, ROWS))])
    encodes, held = [], []
    while bench.scheduler.lifecycle.is_idle is False:
        bench.fill()
        encodes.append(len(bench.steps[-1].encodes) if bench.steps else 0)
        held.append(bench.scheduler.media.cache.num_held)
        bench.answer()
        bench.report()
    assert encodes[:4] == [0, 1, 0, 0]
    assert held[:5] == [0, ROWS, ROWS, 0, 0]
    bench.check_outputs()


def test_spans_name_the_slots_of_a_chunk() -> None:
    bench = bench_of(max_num_batched_tokens=16)
    bench.admit([1, 2, *[3] * 10, 4, *[3] * 10, 5], media=[media_item("a", (2, 10), (13, 10))])
    bench.fill()
    step = bench.steps[0]
    parts = (step.span_rows, step.span_starts, step.span_counts)
    rows, starts, counts = (np.frombuffer(inline(one), np.int32).tolist() for one in parts)
    assert (rows, starts, counts) == ([0, 0], [2, 13], [10, 3])
    slots = np.frombuffer(inline(step.encodes[0].slots), np.int32)
    assert np.array_equal(np.frombuffer(inline(step.span_slots), np.int32), slots[:13])
    finish(bench)


def test_requests_with_the_same_image_share_its_rows() -> None:
    bench = bench_of(prefix_caching=False)
    for _ in range(3):
        admit(bench, "a")
    admit(bench, "a", n=3)
    finish(bench)
    assert num_encoded(bench) == {"a": 1}
    cache = bench.scheduler.media.cache
    assert (cache.num_queries - cache.num_hits, cache.num_rows_encoded) == (1, ROWS)


@pytest.mark.parametrize("num_rows", [ROWS, ROWS + 1, 2 * ROWS, 3 * ROWS])
def test_prompts_with_several_images_don_t_wait_for_each_other(num_rows: int) -> None:
    bench = bench_of(num_encoder_rows=num_rows, max_num_batched_tokens=48)
    for names in (("a", "b", "c"), ("d", "e"), ("c", "b", "a"), ("a", "a", "b")):
        admit(bench, *names)
    finish(bench)
    assert set(bench.finished.values()) == {Finish.LENGTH}


def test_an_item_that_does_not_fit_waits_and_the_text_before_it_does_not() -> None:
    bench = bench_of(max_num_batched_tokens=100)
    admit(bench, "a")
    admit(bench, "b")
    bench.fill()
    assert bench.scheduler.rows.num_computed_tokens[bench.scheduler.rows.order].tolist() == [54, 4]
    finish(bench)
    assert num_encoded(bench) == {"a": 1, "b": 1}


def test_an_item_that_is_larger_than_the_cache_is_refused() -> None:
    bench = bench_of(num_encoder_rows=ROWS - 1)
    admit(bench, "a")
    assert "takes 40 tokens" in bench.refused[0].failure.message
    assert "execute.encoder_cache_bytes" in bench.refused[0].failure.message
    bench = bench_of(num_encoder_rows=0)
    admit(bench, "a")
    assert bench.refused[0].failure.message == "this model takes no images"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_preempted_sequence_gives_its_rows_back(preemption: str) -> None:
    bench = bench_of(max_num_batched_tokens=24, num_swap_blocks=20, kv_offload=False, preemption=preemption)
    admit(bench, "a")
    bench.fill()
    bench.answer()
    bench.scheduler.lifecycle.preempt(0)
    bench.check()
    assert bench.scheduler.media.cache.num_held == 0
    admit(bench, "b")
    finish(bench)


def test_an_aborted_sequence_gives_its_rows_back() -> None:
    bench = bench_of(max_num_batched_tokens=24)
    number = admit(bench, "a")
    bench.fill()
    bench.abort(number)
    bench.check()
    assert bench.scheduler.media.cache.num_held == 0


@pytest.mark.parametrize("num_run", [0, 1])
def test_items_are_encoded_again_when_the_executor_has_died(num_run: int) -> None:
    bench = bench_of(max_num_batched_tokens=24)
    admit(bench, "a")
    bench.fill()
    bench.lose_executor(num_run)
    bench.check()
    finish(bench)
    assert num_encoded(bench) == {"a": 1}


def test_items_are_encoded_again_behind_a_sleep() -> None:
    bench = bench_of(max_num_batched_tokens=24, block_bytes=1, sleep_cache_bytes=100)
    admit(bench, "a")
    bench.fill()
    bench.sleep()
    finish(bench)
    assert num_encoded(bench) == {"a": 1}


def bench_with_stream(depth: int = 1, **changes: Any) -> Bench:
    """A stream decodes, and the time of an encode is known: 40 ms, which is that of 20 steps of the stream."""
    fields = {"num_encoder_rows": 4 * ROWS, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    bench = bench_of(depth, **{**fields, "encode_max_slowdown": 1.5, **changes})
    admit(bench, "first", max_tokens=1)
    bench.run()
    bench.admit(range(5), max_tokens=400)
    for _ in range(6):
        bench.fill()
        bench.answer()
        bench.report()
    return bench


@pytest.mark.parametrize("depth", [1, 3])
def test_beside_rows_that_decode_steps_encode_parts(depth: int) -> None:
    bench = bench_with_stream(depth)
    for name in "abc":
        admit(bench, name, max_tokens=1)
    parts: dict[bytes, list[tuple[int, int]]] = {}
    num_steps, seconds = 0, 0.0
    while len(bench.finished) < 4:
        bench.fill()
        step = bench.steps[0]
        assert len(step.encodes) <= 1
        parts_s = sum(0.04 * (job.end_part - job.first_part) / m.NUM_PARTS for job in step.encodes)
        assert parts_s <= 0.0021, "a step takes 2 ms without"
        seconds += parts_s
        num_steps += 1
        for job in step.encodes:
            parts.setdefault(job.key, []).append((job.first_part, job.end_part))
        bench.answer()
        bench.report()
    assert len(parts) == 3
    for each in parts.values():
        assert len(each) > 10 and each[0][0] == 0 and each[-1][1] == m.NUM_PARTS
        assert all(before[1] == after[0] for before, after in pairwise(each))
    assert seconds == pytest.approx(3 * 0.04) and seconds < 0.55 * 0.002 * num_steps
    finish(bench)
    assert num_encoded(bench) == dict.fromkeys(("first", "a", "b", "c"), 1)


@pytest.mark.parametrize("limit", [1.25, 2.0])
def test_images_slow_down_streams_by_the_limit(limit: float) -> None:
    chosen = SchedulerConfig.of(ScheduleSettings(encode_max_slowdown=limit), FACTS).encode_max_slowdown
    bench = bench_with_stream(encode_max_slowdown=chosen)
    admit(bench, "a", max_tokens=1)
    num_steps = 0
    while "a" not in num_encoded(bench):
        bench.fill()
        bench.answer()
        num_steps += 1
    assert num_steps == pytest.approx(0.04 / (0.002 * (limit - 1)), rel=0.1)


@pytest.mark.parametrize(("text", "waits"), [(SHORT_TEXT - 1, True), (SHORT_TEXT, False)])
def test_a_short_text_before_an_image_waits_with_it_beside_streams(text: int, waits: bool) -> None:
    bench = bench_with_stream(prefix_caching=False)
    for name in "abc":
        admit(bench, name, max_tokens=1, text=text)
    lengths: list[int] = []
    while not num_encoded(bench).get("a"):
        bench.fill()
        lengths.append(bench.scheduler.rows.num_computed_tokens[bench.scheduler.rows.order[1:]].max(initial=0))
        bench.answer()
        bench.report()
    assert len(lengths) > 20 and (max(lengths[:-2]) == 0) == waits
    finish(bench)


def begin(bench: Bench, name: str = "a", **others: Any) -> int:
    """A request whose image is encoded in part."""
    number = admit(bench, name, **others)
    for _ in range(4):
        bench.fill()
        bench.answer()
        bench.report()
    bench.check()
    assert bench.scheduler.media.cache.num_held == ROWS
    assert name not in num_encoded(bench)
    return number


def test_the_rest_of_an_item_is_encoded_at_once_when_nothing_decodes() -> None:
    bench = bench_with_stream()
    stream = max(bench.opened)
    begin(bench)
    bench.abort(stream)
    bench.fill()
    bench.answer()
    assert num_encoded(bench) == {"first": 1, "a": 1}
    finish(bench)


def test_an_item_that_is_encoded_in_part_is_given_up_with_its_request() -> None:
    bench = bench_with_stream()
    bench.abort(begin(bench))
    bench.fill()
    bench.answer()
    bench.check()
    assert bench.scheduler.media.cache.num_held == 0
    begin(bench)
    finish(bench)
    assert num_encoded(bench) == {"first": 1, "a": 1}


def parts_until(bench: Bench, *names: str) -> dict[str, int]:
    """How many parts steps encode of each item, until these are whole."""
    num: dict[str, int] = {}
    while not set(names) <= set(num_encoded(bench)):
        bench.fill()
        for job in bench.steps[0].encodes:
            name = job.key.decode().rstrip("-")
            num[name] = num.get(name, 0) + job.end_part - job.first_part
        bench.answer()
        bench.report()
        bench.check()
    return num


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_what_is_encoded_in_part_stays_when_its_row_is_preempted(preemption: str) -> None:
    bench = bench_with_stream(num_swap_blocks=20, kv_offload=False, preemption=preemption)
    begin(bench)
    begun = bench.scheduler.media._begun
    assert begun is not None and begun.num_done
    bench.scheduler.lifecycle.preempt(begun.row)
    bench.check()
    assert parts_until(bench, "a") == {"a": m.NUM_PARTS - begun.num_done}
    finish(bench)
    assert num_encoded(bench) == {"first": 1, "a": 1}


def test_an_item_whose_row_was_preempted_leaves_to_one_that_goes_before_it() -> None:
    bench = bench_with_stream(num_encoder_rows=ROWS)
    begin(bench)
    begun = bench.scheduler.media._begun
    assert begun is not None
    bench.scheduler.lifecycle.preempt(begun.row)
    admit(bench, "b", arrival_s=0.0)
    assert parts_until(bench, "a", "b") == {"a": m.NUM_PARTS, "b": m.NUM_PARTS}
    finish(bench)
    assert num_encoded(bench) == {"first": 1, "a": 1, "b": 1}


def test_what_is_encoded_in_part_is_given_up_when_its_preempted_request_is_aborted() -> None:
    bench = bench_with_stream()
    number = begin(bench)
    begun = bench.scheduler.media._begun
    assert begun is not None
    bench.scheduler.lifecycle.preempt(begun.row)
    bench.abort(number)
    bench.check()
    assert bench.scheduler.media.cache.num_held == 0
    finish(bench)


def test_a_row_costs_what_is_encoded_of_its_item() -> None:
    bench = bench_with_stream()
    begin(bench)
    media = bench.scheduler.media
    begun = media._begun
    assert begun is not None
    rows = np.array([begun.row, 1 - begun.row])
    assert media.recompute_s(rows).tolist() == [media.costs.row_s * ROWS * begun.num_done / m.NUM_PARTS, 0.0]


def test_an_item_that_is_encoded_in_part_begins_again_when_the_executor_has_died() -> None:
    bench = bench_with_stream()
    begin(bench)
    bench.lose_executor(0)
    bench.check()
    finish(bench)
    assert num_encoded(bench) == {"a": 1}


def test_text_does_nothing_for_images() -> None:
    bench = bench_of()
    bench.admit(range(50))
    while not bench.scheduler.lifecycle.is_idle:
        bench.fill()
        step = bench.steps[-1]
        assert not (step.encodes or step.span_rows or step.span_slots)
        bench.answer()
        bench.report()


def test_pixels_are_freed_when_a_request_is_closed_and_kept_when_ingest_dies() -> None:
    bench = bench_of()
    freed: list[Any] = []
    bench.scheduler._state.context = msgspec.structs.replace(bench.scheduler._state.context, done=freed.append)
    number = admit(bench, "a")
    admit(bench, "a", request_id=number)  # it is here already
    assert len(freed) == 1
    bench.run()
    assert len(freed) == 1, "the request may be computed again"
    bench.scheduler.close(m.Closed(number, 1))
    assert len(freed) == 2


def test_a_prompt_whose_run_is_whole_is_preempted_by_the_plan_that_deferred_it() -> None:
    few = {"num_blocks": 6, "max_num_seqs": 2, "max_num_batched_tokens": 16, "long_prompt_tokens": 20}
    bench = bench_of(**few, policy="priority", kv_groups=(KVGroup(1),), prefix_caching=False, max_whole_run=ROWS)
    bench.admit([1], 1, 3, priority=-1)
    bench.admit([3] * 17, 1, priority=0, media=[media_item("c", (0, 17))])
    finish(bench)


def test_a_run_whose_positions_see_each_other_is_in_one_step() -> None:
    bench = bench_of(max_num_batched_tokens=16, max_whole_run=ROWS)
    bench.admit(range(5), max_tokens=60)
    admit(bench, "a", "b", text=10)
    counts = []
    while not bench.scheduler.lifecycle.is_idle:
        bench.fill()
        for step in bench.steps:
            counts += np.frombuffer(inline(step.counts), np.int32).tolist()
        bench.answer()
        bench.report()
    assert counts.count(ROWS) == 2
    bench.check_outputs()
