"""The schedule stage as in its own process: real sockets and segments, with a fake executor."""

import os
from typing import Literal

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ExecuteSettings, GatewaySettings, ScheduleSettings, Settings
from pipeline.metrics.stats import StageCounts
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import ShmRef
from pipeline.stages.schedule.output.output_buffer import OutputBuffer
from tests.fakes import FakeExecutor, expected
from tests.logs import lines_of
from tests.rig import Rig, raw
from tests.stages.schedule.neighbours import FACTS, Neighbours


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


def test_each_process_of_the_executor_knows_that_grammars_come() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        rig.send(m.ExpectGrammars(), "ingest.0")
        assert rig.receive("execute", m.ExpectGrammars) == m.ExpectGrammars()
        rig.restart("execute.0")
        assert rig.receive("execute", m.ExpectGrammars) == m.ExpectGrammars()
