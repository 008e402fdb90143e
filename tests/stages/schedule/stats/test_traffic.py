"""What schedule notes for `pipeline record traffic`."""

import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import GatewaySettings
from pipeline.errors import UserError
from pipeline.replay.traffic import TrafficRecord, TrafficReply, line_of
from pipeline.runtime import messages as m
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.stages.schedule.stats import traffic
from pipeline.stages.schedule.stats.traffic import TrafficRecorder, profile_of
from tests.stages.schedule.bench import Bench

BLOCK = 32


class Recorded(Bench):
    """A scheduler whose traffic is recorded."""

    def __init__(self, salt: bytes = b"salt" * 8, lease_s: float = 60.0) -> None:
        super().__init__(
            SchedulerConfig(num_blocks=256, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64), 1
        )
        self.salt = salt
        self.recorder = TrafficRecorder(self.scheduler, lambda: profile_of(self.scheduler, GatewaySettings()))
        self.recorder.start(m.RecordTraffic(0, salt, BLOCK, lease_s))
        self.num = 0

    def request(self, prompt: list[int], **options: Any) -> int:
        """Admit a request. Returns its id."""
        self.num += 1
        self.scheduler.now_s = time.monotonic()
        raw = msgspec.Raw(msgspec.msgpack.encode(m.GenerationOptions(**({"max_tokens": 8} | options))))
        ids = np.array(prompt, np.int32).tobytes()
        self.scheduler.admit(m.Admit(self.num, 1, 0, float(self.num), ids, raw))
        return self.num

    def compute(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.fill()
            if self.steps:
                self.answer()

    def close(self, request_id: int) -> None:
        message = m.Closed(request_id, 1)
        self.recorder.closed(message)
        self.scheduler.close(message)

    def take(self, *, goes_on: bool = True) -> TrafficReply:
        return self.recorder.take(m.TakeTraffic(0, self.salt, goes_on))

    def note(self, prompt: list[int], **options: Any) -> TrafficRecord:
        """Compute a request to its end, and return what was noted."""
        request_id = self.request(prompt, **options)
        self.compute(40)
        self.close(request_id)
        (record,) = self.take().records
        return record


def ids_from(first: int, num: int = 80) -> list[int]:
    return list(range(first, first + num))


def test_lengths_times_and_prefixes_are_noted() -> None:
    bench = Recorded()
    first = bench.note(ids_from(100), max_tokens=30, priority=5)
    assert (first.input_length, first.output_length, first.block_size, first.priority) == (80, 30, BLOCK, 5)
    assert (len(first.hash_ids), len(first.output_hash_ids)) == (2, 1)
    assert 0 <= first.timestamp < 1000 * 60
    same_start = bench.note(ids_from(100, 40) + ids_from(500, 40))
    assert same_start.hash_ids[0] == first.hash_ids[0] and same_start.hash_ids[1] != first.hash_ids[1]
    assert same_start.timestamp >= first.timestamp


def test_a_later_turn_finds_the_blocks_of_the_answer() -> None:
    bench = Recorded()
    request_id = bench.request(ids_from(100, 40), max_tokens=60)
    bench.compute(80)
    ids = bench.scheduler.requests[request_id].sequences[0].ids.tolist()
    bench.close(request_id)
    (first,) = bench.take().records
    second = bench.note([*ids, 7, 8, 9])
    assert second.hash_ids[:3] == (first.hash_ids + first.output_hash_ids)[:3]
    assert len(first.output_hash_ids) == 2


def test_no_text_and_no_token_id_is_in_a_trace() -> None:
    """Ids above all lengths, so that any of them would be seen as a number; and names as in a client's request."""
    bench = Recorded()
    ids = ids_from(123_000)
    line = line_of(bench.note(ids, cache_salt="tenant-7", stop=["zebra"], prediction="giraffe")).decode()
    numbers = set(map(int, re.findall(r"\d+", line)))
    assert not numbers & set(ids)
    assert not any(word in line for word in ("tenant", "zebra", "giraffe", "salt"))
    allowed = set(TrafficRecord.__struct_fields__)
    assert set(msgspec.json.decode(line)) <= allowed


def test_hashes_depend_on_a_salt_that_is_not_in_the_trace() -> None:
    first, again, other = (Recorded(salt).note(ids_from(100)) for salt in (b"a" * 32, b"a" * 32, b"b" * 32))
    assert first.hash_ids == again.hash_ids
    assert not set(first.hash_ids) & set(other.hash_ids)
    assert b"a" * 8 not in line_of(first)


def test_clients_with_other_cache_salts_share_no_hashes() -> None:
    bench = Recorded()
    one, other = bench.note(ids_from(100), cache_salt="one"), bench.note(ids_from(100), cache_salt="other")
    assert not set(one.hash_ids) & set(other.hash_ids)


def test_requests_without_a_prefix_cache_have_no_hashes() -> None:
    assert Recorded().note(ids_from(100), num_prompt_logprobs=0).hash_ids == []


def test_each_sample_has_a_length() -> None:
    record = Recorded().note(ids_from(100), n=3, max_tokens=4)
    assert record.output_lengths == [4, 4, 4] and record.output_length == 4


def test_requests_before_the_recording_are_left_out() -> None:
    bench = Recorded()
    request_id = bench.request(ids_from(100))
    bench.recorder.take(m.TakeTraffic(0, bench.salt, goes_on=False))
    bench.scheduler.now_s = time.monotonic()
    bench.recorder.start(m.RecordTraffic(0, bench.salt, BLOCK, 60.0))
    bench.compute(20)
    bench.close(request_id)
    assert bench.take(goes_on=False).records == []


def test_open_requests_are_noted_when_the_recording_ends() -> None:
    bench = Recorded()
    bench.request(ids_from(100), max_tokens=100)
    bench.request(ids_from(300), max_tokens=100)
    bench.compute(10)
    first, second = bench.take(goes_on=False).records
    assert 0 < first.output_length < 100 and first.input_length == 80
    assert second.output_length < 100
    with pytest.raises(UserError, match="has ended"):
        bench.take()


def test_what_is_not_taken_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_KEPT", 3)
    bench = Recorded()
    for number in range(5):
        request_id = bench.request(ids_from(100 * number, 20))
        bench.compute(20)
        bench.close(request_id)
    reply = bench.take()
    assert (len(reply.records), reply.num_lost) == (3, 2)


def test_a_recording_ends_if_its_command_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Recorded(lease_s=60.0)
    with pytest.raises(UserError, match="already being recorded"):
        bench.recorder.start(m.RecordTraffic(0, b"x" * 32, BLOCK, 60.0))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 100)
    bench.close(bench.request(ids_from(1)))
    assert not bench.recorder.is_on
    bench.recorder.start(m.RecordTraffic(0, b"x" * 32, BLOCK, 60.0))
    with pytest.raises(UserError, match="has ended"):
        bench.take()


def test_the_servers_speed_is_that_of_its_cost_model() -> None:
    bench = Recorded()
    reply = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.take()), type=TrafficReply)
    assert not reply.profile.is_known
    for first in range(0, 2000, 100):
        bench.note(ids_from(first))
    profile = bench.take().profile
    assert profile.is_known
    assert profile.kv_tokens == 256 * 16 and profile.max_num_seqs == 8
    assert profile.token_s == bench.scheduler.cost_model.coefficients[3]
