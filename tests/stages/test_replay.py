"""The replay of a stage's recording sends the same bytes."""

import contextlib
import gc
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import psutil
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.config.settings import IngestSettings, ScheduleSettings, Settings
from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.replay.compare import compare
from pipeline.replay.recorder import FileWriter, RecordState
from pipeline.runtime import messages as m
from pipeline.shm.arrays import ShmRef
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import ids_of, opening
from tests.stages.detokenize.test_stage import receive_until_closed, settled
from tests.stages.detokenize.vocabularies import byte_level
from tests.stages.execute import checkpoints, recurrent_models
from tests.stages.execute.driver import make_step, row_add, settings
from tests.stages.execute.grammar_masks.test_masks import ENDLESS
from tests.stages.ingest import models as tiny
from tests.stages.replays import entries, messages_in, order, replay_partial, replays_alike
from tests.stages.schedule.test_stage import FACTS, Neighbours

TEXT_FACTS = m.ExecuteFacts(num_blocks=8, block_size=16, max_model_len=128, vocab_size=420)


@pytest.fixture(autouse=True)
def collector() -> Any:
    yield
    gc.unfreeze()


# ---------------------------------------------------------------------------------------------------------- detokenize


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def talk(rig: Rig, first: int, num: int = 3) -> None:
    """Some sequences from opening to end; the ids of the second report are in shared memory."""
    arena = rig.arena("schedule.0")
    seqs = range(first, first + num)
    for seq in seqs:
        rig.send(opening(seq, m.GenerationOptions(stop=["STOP"])), "schedule.0")
    rig.send(settled([(seq, 0, ids_of("hello "), m.Finish.NONE) for seq in seqs]), "schedule.0")
    long = "x🤖" * 700
    big = settled(
        [(seq, 6, ids_of(long), m.Finish.NONE) for seq in seqs],
        lambda array: arena.put(array.tobytes(), readers=("detokenize.0",)),
    )
    assert isinstance(big.ids, ShmRef)
    rig.send(big, "schedule.0")
    end = 6 + len(ids_of(long))
    rig.send(settled([(seq, end, ids_of("STOP and more"), m.Finish.NONE) for seq in seqs]), "schedule.0")
    rig.send(settled([(seq, end + 13, [], m.Finish.ABORT) for seq in seqs]), "schedule.0")
    receive_until_closed(rig, *seqs)


def test_a_replay_of_detokenize_sends_the_same_also_in_its_own_process(text_dir: Path, tmp_path: Path) -> None:
    recording = tmp_path / "detokenize.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
        rig.send(m.Reject(99, 1, 0, m.Failure(400, "no")), "schedule.0")
        rig.receive("gateway", m.Rejected)
        rig.load()
    comparison = replays_alike("detokenize", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}
    assert replays_alike("detokenize", recording, inline=False) == comparison
    arrays = [
        len(array) for one in entries(recording) if isinstance(one, f.LoopTurn) for a in one.arrays for array in a
    ]
    assert max(arrays) > 4096, "the file contains the data from shared memory"


def state_of(rig: Rig, control_request: m.EndRecord | m.KeepRecord) -> RecordState:
    rig.send(control_request)
    answer = rig.receive("supervisor", m.Answer)
    assert answer.error == ""
    return msgspec.msgpack.decode(answer.body, type=RecordState)


def end_record(rig: Rig, path: Path) -> int:
    """End a recording and wait until it is written. Returns its size."""
    end = time.monotonic() + 20
    while not (state := state_of(rig, m.EndRecord(2, str(path)))).is_closed:
        assert time.monotonic() < end, state
    return state.num_bytes


def test_ending_a_recording_does_not_wait_for_the_disk(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    write = FileWriter._write

    def stuck(self: FileWriter, data: bytes) -> None:
        assert let_go.wait(20)
        write(self, data)

    monkeypatch.setattr(FileWriter, "_write", stuck)
    recording, path = tmp_path / "stuck.rec", str(tmp_path / "stuck.rec")
    with Rig("detokenize", model_dir=text_dir) as rig:
        rig.start(TEXT_FACTS)
        rig.send(order(recording, TEXT_FACTS))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        talk(rig, 10)
        state = state_of(rig, m.EndRecord(2, path))
        assert state.ended and state.num_pending_bytes > 0 and not state.is_closed
        rig.load()  # the loop continues while nothing can be written
        rig.send(order(recording, TEXT_FACTS))
        assert "is still writing its last recording into" in rig.receive("supervisor", m.Answer).error
        let_go.set()
        assert end_record(rig, recording) == recording.stat().st_size
        rig.send(m.EndRecord(3, path))
        assert "not being recorded" in rig.receive("supervisor", m.Answer).error
    with f.RecordingReader(recording) as reader:
        assert f.Sent in set(map(type, reader))
        assert reader.end == f.End("who began it ended it")


def test_an_idle_stage_can_be_recorded_again_after_its_recorder_is_gone(text_dir: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.rec", tmp_path / "second.rec"
    with Rig("detokenize", model_dir=text_dir) as rig:
        rig.start(TEXT_FACTS)
        rig.send(msgspec.structs.replace(order(first, TEXT_FACTS), lease_s=30.0))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.send(order(second, TEXT_FACTS))
        assert "is already being recorded" in rig.receive("supervisor", m.Answer).error
        assert not state_of(rig, m.KeepRecord(2, str(first))).ended
        assert state_of(rig, m.KeepRecord(2, str(second))).is_closed, "that is another recording"
        end_record(rig, first)
        rig.send(msgspec.structs.replace(order(first, TEXT_FACTS), lease_s=1e-3))
        assert rig.receive("supervisor", m.Answer).error == ""
        end = time.monotonic() + 20
        while True:  # only these messages wake the stage
            rig.send(order(second, TEXT_FACTS))
            if rig.receive("supervisor", m.Answer).error == "":
                break
            assert time.monotonic() < end
        assert not state_of(rig, m.KeepRecord(2, str(second))).ended


def test_a_recording_started_in_the_middle_omits_earlier_sequences(text_dir: Path, tmp_path: Path) -> None:
    recording = tmp_path / "late.rec"
    with Rig("detokenize", model_dir=text_dir) as rig:
        rig.start(TEXT_FACTS)
        rig.send(opening(7), "schedule.0")
        rig.send(settled([(7, 0, ids_of("early"), m.Finish.NONE)]), "schedule.0")
        rig.receive("gateway", m.Deltas)
        rig.send(order(recording, TEXT_FACTS))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        talk(rig, 10)
        rig.send(settled([(7, 5, ids_of(" late"), m.Finish.LENGTH)]), "schedule.0")
        assert rig.receive("gateway", m.Deltas).texts == [" late"]
        assert end_record(rig, recording) == recording.stat().st_size
        rig.send(m.EndRecord(3))
        assert "not being recorded" in rig.receive("supervisor", m.Answer).error
    counts = replay_partial("detokenize", recording).counts
    assert counts["entries of earlier sequences"] == 1
    out = compare(recording.with_suffix(".out0"), None)
    with Rig("detokenize", model_dir=text_dir, record=tmp_path / "alone.rec") as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 10)
    assert set(out.sent) == set(compare(tmp_path / "alone.rec", None).sent)


# ------------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replay_of_schedule_plans_the_same_steps(tmp_path: Path, depth: Literal[1, 2]) -> None:
    recording = tmp_path / "schedule.rec"
    limits = ScheduleSettings(max_steps_in_flight=depth, max_num_batched_tokens=64)
    with Rig("schedule", Settings(schedule=limits), record=recording) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(2000)))  # its ids are in shared memory, to schedule and to execute
        for request_id in range(2, 12):
            around.admit(request_id, list(range(request_id, request_id + 40)), n=2)
        rig.load()
        rig.send(m.Abort(3, 1), "gateway.0")
        rig.send(m.Abort(77, 1), "gateway.0")
        rig.load()
        around.admit(77, [1, 2, 3])
        around.until_finished(1 + 2 * 10)
        for request_id in range(1, 12):
            rig.send(m.Closed(request_id, 1), "gateway.0")
        rig.load()
    comparison = replays_alike("schedule", recording)
    assert {"execute.0", "detokenize.0", "ingest.0"} == set(comparison.sent)
    assert any(len(array) > 4096 for one in entries(recording) if isinstance(one, f.Sent) for array in one.arrays)


def test_a_replay_of_schedule_tries_the_same_depths(tmp_path: Path) -> None:
    recording = tmp_path / "auto.rec"
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight="auto")), record=recording) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        for request_id in (1, 2, 3, 4):
            around.admit(request_id, [request_id, 2, 3], max_tokens=320)
        rig.until(lambda load: load.num_running + load.num_waiting == 4)
        used = [1]
        while (load := rig.load()).num_running:
            used += [load.depth] if load.depth != used[-1] else []
            around.compute_s, around.wait_s = (0.010, 0.002) if load.depth == 1 else (0.011, 0.0)
            around.step()
        around.until_finished(4)
        assert used == [1, 2, 1, 2, 1, 2, 1, 2]
    replays_alike("schedule", recording)


def test_a_schedule_recording_started_in_the_middle_replays_with_a_fake_executor(tmp_path: Path) -> None:
    recording = tmp_path / "late.rec"
    with Rig("schedule", Settings()) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(50)), max_tokens=40)
        for _ in range(5):
            around.step()
        rig.send(order(recording, FACTS))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        around.admit(2, list(range(60)), max_tokens=20)
        rig.send(m.Abort(1, 1), "gateway.0")
        around.until_finished(2)
        rig.send(m.Closed(1, 1), "gateway.0")
        rig.load()
    counts = replay_partial("schedule", recording).counts
    assert counts["ends of earlier requests"] == 2
    assert counts["replaced results"] > 10
    assert compare(recording.with_suffix(".out0"), None).sent["execute.0"] >= 15


# -------------------------------------------------------------------------------------------------------------- ingest


def test_a_replay_of_ingest_sends_the_same_prompts_with_any_thread_times(tmp_path: Path, smollm2_dir: Path) -> None:
    recording = tmp_path / "ingest.rec"
    sets = Settings(ingest=IngestSettings(arena_bytes=65536))
    with Rig("ingest", sets, model_dir=smollm2_dir, record=recording) as rig:
        rig.start(tiny.facts(max_model_len=100_000, vocab_size=49152))
        long = "a story of the sea. " * 3000
        for i in range(3):
            rig.send(tiny.submit(tiny.chat("hi"), request_id=10 + i), "gateway.0")
            rig.send(tiny.submit(long + str(i), request_id=20 + i), "gateway.0")
        rig.send(m.Abort(22, 1), "gateway.0")
        rig.send(tiny.submit("", request_id=30), "gateway.0")
        ended: set[int] = set()
        while len(ended) < 7:
            message = rig.receive("gateway")
            ended.add(message.request_id)
            if isinstance(message, m.Accepted) and isinstance(message.prompt_ids, ShmRef):
                slab = message.prompt_ids
                for reader in ("gateway.0", "schedule.0"):
                    rig.send(m.Release([slab.offset], [slab.generation], reader), reader)
        rig.load()
    assert any(isinstance(one, f.ObservedEvent) and one.name == "encoded" for one in entries(recording))
    comparison = replays_alike("ingest", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}


def kill_busy_checker(killed: set[int]) -> int:
    """Kill the process that checks grammars when it works, if it is none of those. Returns its pid."""
    end_s = time.monotonic() + 10
    while True:
        assert time.monotonic() < end_s, "nothing is checked"
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if one.pid not in killed and "grammars" in one.cmdline()[0] and one.children():
                    one.kill()
                    return one.pid
        time.sleep(0.002)


def test_a_replay_of_ingest_repeats_the_recorded_results_of_its_grammar_checker(tmp_path: Path) -> None:
    """The recorded checker was killed during its work, which is a 503; the replay's checker returns a 400."""
    recording = tmp_path / "grammars.rec"
    with Rig("ingest", Settings(), model_dir=tiny.folder(tmp_path), record=recording) as rig:
        rig.start(tiny.facts())
        good = tiny.submit("hi", request_id=1, grammar=m.Grammar("regex", "a+"))
        rig.send(good, "gateway.0")
        rig.receive("gateway", m.Accepted)
        hostile = tiny.submit("hi", request_id=2, grammar=m.Grammar("grammar", ENDLESS))
        rig.send(hostile, "gateway.0")
        killed: set[int] = set()
        for _ in range(2):  # a check whose checker was killed is tried once more
            killed.add(kill_busy_checker(killed))
        assert rig.receive("gateway", m.Rejected).failure.status == 503
        rig.load()
    comparison = replays_alike("ingest", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}


def test_a_replay_needs_no_folder_of_sampling_parameters(tmp_path: Path) -> None:
    recording, parameters = tmp_path / "ingest.rec", tmp_path / "parameters" / "generation_config.json"
    parameters.parent.mkdir()
    parameters.write_text('{"max_new_tokens": 7, "suppress_tokens": [5], "begin_suppress_tokens": [6]}')
    sets = Settings(generation_config=str(parameters.parent))
    with Rig("ingest", sets, model_dir=tiny.folder(tmp_path), record=recording) as rig:
        rig.start(tiny.facts())
        rig.send(tiny.submit("hi"), "gateway.0")
        options = msgspec.msgpack.decode(rig.receive("schedule", m.Admit).options, type=m.GenerationOptions)
        assert options.max_tokens == 7 and options.bad_words_ids == [[5], [m.BEGIN, 6]]
        rig.load()
    parameters.unlink()
    assert set(replays_alike("ingest", recording).sent) == {"gateway.0", "schedule.0"}

    old = tmp_path / "old.rec"  # of a version that did not record the parameters
    with f.RecordingReader(recording) as reader:
        header = msgspec.structs.replace(reader.header, generation=None)
        old.write_bytes(f.MAGIC + b"".join(map(f.frame, [header, *reader])))
    with pytest.raises(UserError, match="recorded server's setting generation_config") as error:
        replay("ingest", old, tmp_path / "out", paced=False, inline=True)
    assert str(parameters) in str(error.value)


# ------------------------------------------------------------------------------------------------------------- execute


def run_steps(rig: Rig, row: int, first_step: int, num: int = 4) -> None:
    prompt = list(range(7, 47))
    add = row_add(row, prompt, [3 * row, 3 * row + 1, 3 * row + 2], m.GenerationOptions(temperature=2.0, seed=5))
    rig.send(make_step([(row, 0, 40, True)], adds=[add], step_id=first_step), "schedule.0")
    rig.receive("schedule", m.StepResult)
    for i in range(num):
        rig.send(make_step([(row, 40 + i, 1, True)], step_id=first_step + 1 + i), "schedule.0")
        rig.receive("schedule", m.StepResult)


def test_a_late_replay_of_execute_leaves_out_states_of_earlier_rows(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A new row continues the state of one that was added before the recording."""
    folder, _ = recurrent_models.write(tmp_path_factory.mktemp("recurrent"), recurrent_models.VARIANTS["qwen3_5"])
    late, ids = tmp_path / "late.rec", list(range(7, 55))
    with Rig("execute", settings(), folder) as rig:
        facts = rig.receive("supervisor", m.Ready).facts
        rig.send(m.Start(facts))
        steps = [
            make_step([(1, 0, 32, False)], adds=[row_add(1, ids, [0, 1, 2])], states=[(-1, 4)], step_id=1),
            make_step(
                [(1, 32, 16, True), (0, 32, 16, True)],
                adds=[row_add(0, ids, [0, 1, 3])],
                states=[(4, 5), (4, 6)],
                step_id=2,
            ),
            make_step(
                [(1, 48, 1, True), (0, 48, 1, True)], blocks=[(1, 4), (0, 5)], states=[(5, 5), (6, 6)], step_id=3
            ),
        ]
        for step in steps:
            rig.send(step, "schedule.0")
            rig.receive("schedule", m.StepResult)
            if step.step_id == 1:
                rig.send(order(late, facts))
                assert rig.receive("supervisor", m.Answer).error == ""
            rig.load()
    counts = replay_partial("execute", late).counts
    assert counts["earlier rows in steps"] == 2


def test_a_replay_of_execute_samples_the_same_ids(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.write(folder, checkpoints.config_of())
    recording, late = tmp_path / "execute.rec", tmp_path / "late.rec"
    with Rig("execute", settings(), folder, record=recording) as rig:
        facts = rig.receive("supervisor", m.Ready).facts
        rig.send(m.Start(facts))
        run_steps(rig, 0, 1)
        rig.load()
    assert replays_alike("execute", recording).sent == {"schedule.0": 5}
    with Rig("execute", settings(), folder) as rig:
        facts = rig.receive("supervisor", m.Ready).facts
        rig.send(m.Start(facts))
        run_steps(rig, 1, 1)
        rig.send(order(late, facts))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        rig.send(make_step([(1, 44, 1, True)], step_id=6), "schedule.0")
        rig.receive("schedule", m.StepResult)
        run_steps(rig, 0, 7)
        rig.load()
    counts = replay_partial("execute", late).counts
    assert counts["steps with only earlier rows"] == 1

    def ids(path: Path) -> list[bytes]:
        sent = [one for one in entries(path) if isinstance(one, f.Sent)]
        results = [msgspec.msgpack.decode(one.body, type=m.StepResult) for one in sent]
        return [result.ids for result in results if isinstance(result.ids, bytes)]

    assert ids(late.with_suffix(".out0")) == ids(recording)


# ---------------------------------------------------------------------------------------------------------- deviations


def test_a_deviation_is_reported_with_its_position(text_dir: Path, tmp_path: Path) -> None:
    recording, changed = tmp_path / "a.rec", tmp_path / "b.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
    with f.RecordingReader(recording) as reader:
        frames = [f.frame(reader.header)]
        for one in reader:
            if isinstance(one, f.LoopTurn) and any(
                b"\xa6settled" in body or b"\xa7settled" in body for body in one.bodies
            ):
                frames.append(f.frame(f.Value("monotonic", 1.0)))
            frames.append(f.frame(one))
        frames.append(f.frame(f.End("changed")))
    changed.write_bytes(f.MAGIC + b"".join(frames))
    with pytest.raises(UserError, match=r"after wake \d+: the recorded stage read monotonic here"):
        replay("detokenize", changed, tmp_path / "out", paced=False, inline=True)
    with pytest.raises(UserError, match=r"after wake \d+: the recorded stage read monotonic here"):
        replay("detokenize", changed, tmp_path / "out", paced=False, inline=False)


def test_a_replay_repeats_refused_sends(text_dir: Path, tmp_path: Path) -> None:
    recording, changed = tmp_path / "a.rec", tmp_path / "b.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        rig.send(opening(1), "schedule.0")
        rig.load()
        rig.send(settled([(1, 0, ids_of("ab"), m.Finish.NONE)]), "schedule.0")
        rig.receive("gateway", m.Deltas)
        rig.send(settled([(1, 2, ids_of("cd"), m.Finish.LENGTH)]), "schedule.0")
        rig.receive("gateway", m.Deltas)
    with f.RecordingReader(recording) as reader:
        header, all_entries = reader.header, list(reader)
    index = next(i for i, one in enumerate(all_entries) if isinstance(one, f.Sent))
    all_entries[index] = f.SendRefused("gateway.0")
    changed.write_bytes(f.MAGIC + b"".join(map(f.frame, [header, *all_entries, f.End("changed")])))
    replay("detokenize", changed, tmp_path / "out", paced=False, inline=True)
    (deltas,) = [
        msgspec.msgpack.decode(one.body, type=m.Deltas) for one in entries(tmp_path / "out") if isinstance(one, f.Sent)
    ]
    assert deltas.texts == ["abcd"], "refused output is sent with the next message"


def test_a_paced_replay_takes_as_long_as_the_recording(text_dir: Path, tmp_path: Path) -> None:
    recording = tmp_path / "a.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
        rig.nothing("gateway", 0.3)
        talk(rig, 10)
    last_s = max(one.time_ns for one in entries(recording) if isinstance(one, f.LoopTurn)) / 1e9
    assert last_s > 0.3
    paced = replay("detokenize", recording, tmp_path / "out", paced=True, inline=True)
    assert paced.took_s >= last_s
    assert compare(tmp_path / "out", recording).are_same
    assert paced.counts["messages"] == messages_in(recording)
    assert np.isclose(paced.took_s, last_s, atol=5.0)
