"""The schedule stage as in its own process: real sockets and segments, with a fake executor."""

import os
import time
from collections import defaultdict
from typing import Literal

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ExecuteSettings, GatewaySettings, ScheduleSettings, Settings
from pipeline.metrics.batch_size_buckets import BATCH_SIZE_BUCKETS
from pipeline.metrics.stats import ScheduleCounts, StageCounts
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import ShmRef
from pipeline.stages.schedule.output.output_buffer import OutputBuffer
from tests.fakes import FakeExecutor, expected
from tests.logs import lines_of
from tests.rig import PATIENCE_S, Rig, raw

FACTS = m.ExecuteFacts(num_blocks=512, block_size=16, max_model_len=4096, vocab_size=997)


class Neighbours:
    """Plays ingest, execute and detokenize around a schedule stage."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.executor = FakeExecutor(
            FACTS.num_blocks, take=lambda array, dtype: np.frombuffer(self._bytes(array), dtype).copy()
        )
        self.releases: list[tuple[int, int]] = []
        self.opened: dict[int, m.Open] = {}
        self.received: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, int] = {}
        self.compute_s = self.wait_s = 0.0
        """The executor's facts about its steps."""

    def _bytes(self, array: m.Array) -> bytes:
        if isinstance(array, ShmRef):
            self.releases.append((array.offset, array.generation))
        return self.rig.bytes_of(array)

    def admit(self, request_id: int, prompt: list[int], max_tokens: int = 6, n: int = 1, gateway: int = 1) -> None:
        """`gateway` is the incarnation of the gateway."""
        ids = self.rig.arena("ingest.0").put(np.array(prompt, np.int32).tobytes(), readers=("schedule.0",))
        options = raw(m.GenerationOptions(n=n, max_tokens=max_tokens))
        admit = m.Admit(request_id, 1, 0, float(request_id), ids, options, gateway_incarnation=gateway)
        self.rig.send(admit, "ingest.0")

    def step(self) -> m.Step:
        step: m.Step = self.rig.receive("execute", m.Step)
        result = msgspec.structs.replace(self.executor.run(step), compute_s=self.compute_s, wait_s=self.wait_s)
        self.rig.send(result, "execute.0")
        return step

    def until_finished(self, num_sequences: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while len(self.finished) < num_sequences:
            assert time.monotonic() < end, f"only {self.finished} have finished"
            if not self.rig.nothing("execute", 0):
                self.step()
            if not self.rig.nothing("detokenize", 0.001):
                self.detokenize()

    def detokenize(self) -> None:
        match self.rig.receive("detokenize"):
            case m.Open() as opening:
                self.opened[opening.seq] = opening
            case m.Settled() as settled:
                ids = np.frombuffer(self._bytes(settled.ids), np.int32).tolist()
                seqs = np.frombuffer(self._bytes(settled.seqs), np.uint64).tolist()
                counts = np.frombuffer(self._bytes(settled.counts), np.int32).tolist()
                finishes = np.frombuffer(self._bytes(settled.finishes), np.uint8).tolist()
                for seq, num, finish in zip(seqs, counts, finishes, strict=True):
                    assert seq not in self.finished, "an entry came after the closing"
                    self.received[seq] += ids[:num]
                    ids = ids[num:]
                    if finish:
                        self.finished[seq] = finish


def test_a_sleeping_executor_is_woken_while_its_next_step_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each result, before the step, if no other step is in flight."""
    events: list[str] = []
    send = Outbox.send

    def sent(self: "Outbox[object]", message: object) -> bool:
        events.append(type(message).__name__)
        return send(self, message)

    monkeypatch.setattr(Outbox, "wake", lambda self: events.append("wake"))
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        monkeypatch.setattr(Outbox, "send", sent)
        around.admit(1, list(range(20)), max_tokens=6)
        around.until_finished(1)
    assert [event for event in events if event in ("wake", "Step", "StepResult")][:6] == [
        *("Step", "StepResult", "wake"),
        *("Step", "StepResult", "wake"),
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_requests_are_answered_with_exactly_their_ids(depth: Literal[1, 2, 3, 4]) -> None:
    """For any `gateway.max_open_sequences`, the edges have room for steps and their output."""
    gateway = GatewaySettings(max_open_sequences=1)
    with Rig(
        "schedule",
        Settings(gateway=gateway, schedule=ScheduleSettings(max_steps_in_flight=depth, max_num_batched_tokens=64)),
    ) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        prompts = {number: list(range(number, number + 20 * number)) for number in range(1, 9)}
        for number, prompt in prompts.items():
            around.admit(number, prompt, max_tokens=5 + number)
        around.until_finished(8)
        for seq, opening in around.opened.items():
            number = opening.request_id
            assert (around.received[seq], around.finished[seq]) == expected(
                prompts[number], m.GenerationOptions(), 0, 5 + number
            )
            tail = np.frombuffer(opening.prompt_tail, np.int32).tolist()
            assert tail == prompts[number][-8:]
        load = rig.load()
        assert (load.num_running, load.num_waiting, load.num_blocks_held) == (0, 0, 0)


def test_messages_that_arrive_before_start_are_handled_after_it() -> None:
    with Rig("schedule") as rig:
        rig.receive("supervisor", m.Ready)
        around = Neighbours(rig)
        around.admit(
            1, list(range(2000)), max_tokens=3
        )  # in shared memory, which must not be released before the start
        around.admit(2, [1, 2, 3], max_tokens=3)
        around.admit(3, [1, 2, 4], max_tokens=3)
        rig.load()  # all of this has been read from the inbox
        rig.send(m.Abort(2, 1), "gateway.0")
        rig.load()
        assert rig.nothing("execute") and rig.nothing("ingest", 0) and rig.nothing("detokenize", 0)
        rig.send(m.Start(FACTS))
        around.until_finished(3)
        requests = {opening.request_id: seq for seq, opening in around.opened.items()}
        assert around.finished == {
            requests[1]: Finish.LENGTH,
            requests[2]: Finish.ABORT,
            requests[3]: Finish.LENGTH,
        }
        assert around.received[requests[1]] == expected(list(range(2000)), m.GenerationOptions(), 0, 3)[0]
        rig.receive("ingest", m.Release)


def test_a_stage_can_be_stopped_before_start_after_any_messages() -> None:
    with Rig("schedule") as rig:
        rig.receive("supervisor", m.Ready)
        Neighbours(rig).admit(1, [1, 2, 3])
        rig.load()


def counts_of(rig: Rig) -> ScheduleCounts:
    rig.send(m.Count(1))
    counts = msgspec.msgpack.decode(rig.receive("supervisor", m.Answer).body, type=StageCounts)
    assert isinstance(counts.own, ScheduleCounts)
    return counts.own


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_waits_for_a_plan_are_counted_and_waits_for_requests_are_not(depth: Literal[1, 2, 4]) -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=depth))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.wait_s, around.compute_s = 0.25, 0.5
        for request_id in (1, 2, 3):  # the server is idle when each request arrives
            around.admit(request_id, [request_id, 2, 3], max_tokens=5)
            around.until_finished(request_id)
            rig.until(lambda load: load.num_running == 0)
        counts = counts_of(rig)
        assert (counts.num_steps, counts.depth) == (15, depth)
        assert sum(counts.plan_wait_s.counts) == 3 * 4, "the first step of each waited for its request"
        assert counts.plan_wait_s.total == pytest.approx(3 * 4 * 0.25)
        (gaps,) = counts.gaps
        assert (BATCH_SIZE_BUCKETS[gaps.batch], sum(gaps.gap_s.counts), gaps.step_s) == (
            "1",
            3 * 4,
            pytest.approx(3 * 4 * 0.5),
        )


@pytest.mark.parametrize(("device", "better"), [("cpu", 1), ("cpu", 2), ("cuda", 2), ("cuda", 3)])
def test_depth_auto_finds_the_better_depth_and_every_id_is_right(device: Literal["cpu", "cuda"], better: int) -> None:
    with Rig(
        "schedule",
        Settings(execute=ExecuteSettings(device=device), schedule=ScheduleSettings(max_steps_in_flight="auto")),
    ) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        prompts = {number: list(range(number, number + 10)) for number in (1, 2, 3, 4)}
        for number, prompt in prompts.items():
            around.admit(number, prompt, max_tokens=330)
        rig.until(lambda load: load.num_running + load.num_waiting == 4)
        used = set()
        while (load := rig.load()).num_running:
            used.add(load.depth)
            around.compute_s = 0.010 if load.depth == better else 0.011
            around.step()
        assert used == ({1, 2} if device == "cpu" else {2, 3}), "both depths were tried"
        assert rig.load().depth == better
        around.until_finished(4)
        for seq, opening in around.opened.items():
            number = opening.request_id
            assert around.received[seq] == expected(prompts[number], m.GenerationOptions(), 0, 330)[0]


def test_a_long_prompt_is_read_and_sent_in_shared_memory_and_both_slabs_are_freed() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [number % 997 for number in range(3000)], max_tokens=2)
        step = around.step()
        assert isinstance(step.adds[0].ids, ShmRef)
        assert rig.bytes_of(step.adds[0].ids)[:8] == np.array([0, 1], np.int32).tobytes()
        release = rig.receive("ingest", m.Release)
        for offset, generation in zip(release.offsets, release.generations, strict=True):
            assert rig.arena("ingest.0").release(offset, generation, "schedule.0")
        assert rig.arena("ingest.0").num_live == 0
        rig.send(m.Release([step.adds[0].ids.offset], [step.adds[0].ids.generation], "execute.0"), "execute.0")
        around.until_finished(1)
        assert around.finished == {1: Finish.LENGTH}
        assert rig.until(lambda load: load.num_running == 0).num_blocks_held == 0


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_at_greater_depths_later_steps_are_sent_before_the_first_result(depth: Literal[2, 3, 4]) -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=depth))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [1, 2, 3], max_tokens=9)
        steps = [rig.receive("execute", m.Step) for _ in range(depth)]
        assert [step.step_id for step in steps] == list(range(1, depth + 1))
        starts = [np.frombuffer(step.starts, np.int32).tolist() for step in steps]
        assert starts == [[0], *([index] for index in range(3, depth + 2))], "their input ids are not known yet"
        assert rig.nothing("execute")
        rig.send(around.executor.run(steps[0]), "execute.0")
        assert rig.receive("execute", m.Step).step_id == depth + 1
        assert rig.nothing("execute")


@pytest.mark.parametrize("depth", [1, 3])
def test_before_a_successor_takes_over_all_steps_are_settled_and_sent(depth: Literal[1, 3]) -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=depth))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(20)), max_tokens=60)
        for _ in range(6):
            around.step()
        steps = [rig.receive("execute", m.Step) for _ in range(depth)]
        rig.send(m.HandOver(), "supervisor.0")
        around.admit(2, list(range(30)))
        rig.load()
        assert rig.nothing("supervisor", 0), "steps are in flight"
        for step in steps:
            rig.send(around.executor.run(step), "execute.0")
        rig.receive("supervisor", m.Drained)
        while not rig.nothing("detokenize", 0):
            around.detokenize()
        assert rig.nothing("execute", 0)
        seq = next(seq for seq, opening in around.opened.items() if opening.request_id == 1)
        assert len(around.received[seq]) == 6 + depth and not around.finished
        rig.load()
        assert rig.nothing("supervisor", 0), "it answers once"


def test_on_a_gpu_the_default_depth_is_2() -> None:
    depths: tuple[tuple[Literal[0, 1, 3], int], ...] = ((0, 2), (1, 1), (3, 3))
    for depth, num_steps in depths:
        with Rig(
            "schedule",
            Settings(execute=ExecuteSettings(device="cuda"), schedule=ScheduleSettings(max_steps_in_flight=depth)),
        ) as rig:
            rig.start(FACTS)
            Neighbours(rig).admit(1, [1, 2, 3], max_tokens=9)
            for _ in range(num_steps):
                rig.receive("execute", m.Step)
            assert rig.nothing("execute")
            assert rig.load().depth == num_steps


def test_a_wake_of_the_stage_does_not_preempt_the_executor() -> None:
    before = os.sched_getscheduler(0)
    with Rig("schedule") as rig:
        rig.start(FACTS)
        rig.load()  # an answer shows that it has started
        assert rig._thread.native_id is not None
        assert os.sched_getscheduler(rig._thread.native_id) == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == before, "only the thread of the stage"


def test_preemptions_are_logged() -> None:
    facts = msgspec.structs.replace(FACTS, num_blocks=5)
    with lines_of("preempted sequences") as found, Rig("schedule") as rig:
        rig.start(facts)
        around = Neighbours(rig)
        for request_id in (1, 2):
            around.admit(request_id, list(range(30)), max_tokens=34)
        around.until_finished(2)
    assert found[0]["num"] == 1
    assert {"running", "waiting"} <= found[0].keys()


def test_at_depth_1_the_next_step_waits_for_the_result() -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=1))) as rig:
        rig.start(FACTS)
        Neighbours(rig).admit(1, [1, 2, 3], max_tokens=5)
        rig.receive("execute", m.Step)
        assert rig.nothing("execute")


def test_an_aborted_request_closes_once_and_frees_its_blocks() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(100)), max_tokens=1000)
        for _ in range(5):
            around.step()
        rig.send(m.Abort(1, 1), "gateway.0")
        rig.send(m.Abort(1, 1), "gateway.0")
        around.until_finished(1)
        assert around.finished == {1: Finish.ABORT}
        if not rig.nothing("execute", 0):
            around.step()
        rig.until(lambda load: (load.num_running, load.num_blocks_held) == (0, 0))


def test_a_request_aborted_before_it_arrives_is_rejected() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        rig.send(m.Abort(1, 1))
        rig.load()  # uses the same edge, so the abort has been handled
        Neighbours(rig).admit(1, [1, 2])
        rejection = rig.receive("detokenize", m.Reject)
        assert (rejection.request_id, rejection.failure.code) == (1, "aborted")


def test_a_request_that_kills_detokenize_does_not_go_to_its_successor() -> None:
    """The other one does, with all its output."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        for request_id in (1, 2):
            around.admit(request_id, [request_id, 3], max_tokens=8, n=2)
        for _ in range(3):
            around.step()
        rig.load()
        rig.send(m.FailRequests({1: f"detokenize died 3{m.DIED_OF_REQUEST}"}))
        rig.restart("detokenize.0")
        assert [rig.receive("detokenize", m.Open).request_id for _ in range(2)] == [2, 2]
        around.until_finished(2)
        assert [len(ids) for ids in around.received.values()] == [8, 8]
        assert not any(isinstance(message, m.Open) for message in rig._queues["detokenize"])


def test_a_request_of_a_gateway_that_has_died_is_dropped() -> None:
    """Ingest had sent it before it learned of the death. It would never be closed."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        rig.restart("gateway.0")
        around.admit(1, list(range(2000)), gateway=1)
        around.admit(2, [1, 2], gateway=2)
        assert rig.receive("detokenize", m.Open).request_id == 2
        assert rig.receive("ingest", m.Release).offsets, "its ids are released"


def test_a_request_of_a_gateway_that_is_gone_is_dropped() -> None:
    """One that was removed has no successor with a higher number."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        rig.send(m.PeerRestarted(1, m.PeerInbox("gateway.0", "", 0), 1, [], is_removed=True), "supervisor")
        around.admit(1, list(range(2000)), gateway=1)
        around.admit(2, [1, 2], gateway=2)
        assert rig.receive("detokenize", m.Open).request_id == 2
        assert rig.receive("ingest", m.Release).offsets, "its ids are released"


def send_stale_result(rig: Rig) -> None:
    """A result of another scheduler's step, with an array in shared memory."""
    token_outputs = rig.arena("execute.0").put(bytes(5000), readers=("schedule.0",))
    rig.send(m.StepResult(99, 1, b"", b"", b"", b"", 0.0, 0.0, token_outputs=token_outputs), "execute.0")


def is_released(rig: Rig) -> bool:
    """Whether the executor's arena is empty after the next release."""
    release = rig.receive("execute", m.Release)
    arena = rig.arena("execute.0")
    for offset, generation in zip(release.offsets, release.generations, strict=True):
        arena.release(offset, generation, release.reader)
    return arena.num_live == 0


def test_a_result_of_another_incarnation_is_dropped() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        send_stale_result(rig)
        assert is_released(rig)
        around.admit(1, [1, 2, 3], max_tokens=2)
        around.until_finished(1)
        assert around.received[1] == expected([1, 2, 3], m.GenerationOptions(), 0, 2)[0]


def test_a_result_that_arrives_before_start_is_dropped() -> None:
    """A restarted stage may find results for its predecessor's steps in the socket before the supervisor's Start."""
    with Rig("schedule") as rig:
        send_stale_result(rig)
        assert rig.load() == m.PlainLoad()
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [1, 2, 3], max_tokens=2)
        assert is_released(rig)
        around.until_finished(1)
        assert around.received[1] == expected([1, 2, 3], m.GenerationOptions(), 0, 2)[0]


def test_a_stage_that_was_never_started_stops() -> None:
    with Rig("schedule") as rig:
        rig.receive("supervisor", m.Ready)
        assert rig.load() == m.PlainLoad()


def test_slabs_of_a_starting_row_are_reused_after_release() -> None:
    """Each prompt takes more than half of the arena; without the release the second would be sent inline."""
    with Rig("schedule", Settings(schedule=ScheduleSettings(arena_bytes=65536))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        prompt = [number % 997 for number in range(3000)]
        for request_id in range(1, 12):
            around.admit(request_id, [request_id, *prompt], max_tokens=1)
            step = around.step()
            slab = step.adds[0].ids
            assert isinstance(slab, ShmRef)
            rig.send(m.Release([slab.offset], [slab.generation], "execute.0"), "execute.0")
            around.until_finished(request_id)


def test_the_executor_gets_its_step_before_detokenize_gets_output() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [1, 2, 3], max_tokens=3)
        step = rig.receive("execute", m.Step)
        rig.receive("detokenize", m.Open)
        order: list[str] = []
        send, pending = Outbox.send, OutputBuffer.pending

        def report(self: OutputBuffer, replica: int, now_s: float) -> m.Settled | None:
            settled = pending(self, replica, now_s)
            if settled is not None:  # an earlier wake may get here as late as this, with nothing to send
                order.append("report")
            return settled

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outbox, "send", lambda self, one: (order.append(type(one).__name__), send(self, one))[1])
            patch.setattr(OutputBuffer, "pending", report)
            rig.send(around.executor.run(step), "execute.0")
            rig.receive("detokenize", m.Settled)
        assert order.index("Step") < order.index("report")


def test_output_that_detokenize_refuses_is_sent_again_without_loss() -> None:
    refused = 0
    send = Outbox.send

    def refuse_now_and_then(self: "Outbox[object]", message: object) -> bool:
        nonlocal refused
        if isinstance(message, m.Settled | m.Open) and refused < 25:
            refused += 1
            return False
        return send(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "send", refuse_now_and_then)
        with Rig("schedule") as rig:
            rig.start(FACTS)
            around = Neighbours(rig)
            around.admit(1, [1, 2, 3], max_tokens=12)
            around.until_finished(1)
            assert refused == 25
            assert around.received[1] == expected([1, 2, 3], m.GenerationOptions(), 0, 12)[0]


def test_resumed_ids_are_read_and_sent_in_shared_memory_and_the_sequence_continues() -> None:
    prompt, num_known = list(range(30)), 1200
    whole, _ = expected(prompt, m.GenerationOptions(), 0, num_known + 4)
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        arena = rig.arena("ingest.0")
        known = arena.put(np.array(whole[:num_known], np.int32).tobytes(), readers=("schedule.0",))
        assert isinstance(known, ShmRef)
        ids = np.array(prompt, np.int32).tobytes()
        options = raw(m.GenerationOptions(max_tokens=num_known + 4))
        finishes = bytes([Finish.NONE])
        rig.send(m.Admit(1, 1, 0, 1.0, ids, options, [known], finishes), "ingest.0")
        around.until_finished(1)
        ((seq, opening),) = around.opened.items()
        assert isinstance(opening.outputs, ShmRef)
        assert np.frombuffer(rig.bytes_of(opening.outputs), np.int32).tolist() == whole[:num_known]
        assert (around.received[seq], around.finished[seq]) == (whole[num_known:], Finish.LENGTH)
        release = rig.receive("ingest", m.Release)
        assert arena.release(release.offsets[0], release.generations[0], release.reader)


class TestRanks:
    """An executor of two ranks."""

    SETTINGS = Settings(execute=ExecuteSettings(tensor_parallel=2))

    def test_every_rank_gets_each_step_and_frees_its_arrays(self) -> None:
        prompt = list(range(3000))  # its ids travel in shared memory
        with Rig("schedule", self.SETTINGS) as rig:
            rig.start(FACTS)
            around = Neighbours(rig)
            around.admit(1, prompt, max_tokens=3)
            first = around.step()
            (add,) = first.adds
            assert isinstance(add.ids, ShmRef)
            around.until_finished(1)
            assert rig.receive("execute.1", m.Step) == first
            assert [rig.receive("execute.1", m.Step).step_id for _ in range(5)] == list(range(2, 7))

            def arena_used() -> int:
                rig.send(m.Count(1))
                answer = rig.receive("supervisor", m.Answer)
                counts = msgspec.msgpack.decode(bytes(answer.body), type=StageCounts)
                return counts.arena_bytes_used

            assert arena_used() >= 4 * len(prompt)
            for rank in ("execute.0", "execute.1"):
                assert arena_used() >= 4 * len(prompt), f"it was free before {rank} had read it"
                rig.send(m.Release([add.ids.offset], [add.ids.generation], rank), rank)
                rig.load()
            assert arena_used() < 4 * len(prompt)

    def test_no_step_is_planned_until_all_ranks_are_replaced(self) -> None:
        with Rig("schedule", self.SETTINGS) as rig:
            rig.start(FACTS)
            around = Neighbours(rig)
            around.admit(1, list(range(20)), max_tokens=4)
            around.step()
            rig.receive("execute", m.Step)  # in flight when they die
            rig.restart("execute.1")
            around.admit(2, list(range(9)), max_tokens=4)
            rig.load()
            assert rig.nothing("execute") and rig.nothing("execute.1")
            rig.restart("execute.0", {1: 1})
            around.executor = FakeExecutor(
                FACTS.num_blocks, take=lambda array, dtype: np.frombuffer(rig.bytes_of(array), dtype).copy()
            )
            again = rig.receive("execute.1", m.Step)
            assert [len(rig.bytes_of(add.ids)) // 4 for add in again.adds] == [21]  # the suspect runs first
            around.until_finished(2)
