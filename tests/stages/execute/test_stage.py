"""The executor's loop, between a fake supervisor and a fake scheduler."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.replay.compare import compare
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.runtime.token_outputs import embedding_bytes, logprob_bytes
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import ShmRef
from pipeline.stages.execute.cpu.backend import code_of_torch
from tests.rig import Rig
from tests.stages.execute import checkpoints
from tests.stages.execute.checkpoints import VOCAB_SIZE
from tests.stages.execute.driver import Driver, make_step, row_add, settings

PROMPT = [5, 9, 200, 31, 7]
SCHEDULE = "schedule.0"


@pytest.fixture
def rig(tiny_dir: Path) -> Iterator[Rig]:
    with Rig("execute", settings(), tiny_dir) as rig:
        yield rig


def begin(rig: Rig) -> m.ExecuteFacts:
    """Wait until the stage is ready, then start it with its own facts."""
    ready = rig.receive("supervisor", m.Ready)
    rig.send(m.Start(ready.facts))
    return ready.facts


def ids_of(rig: Rig, result: m.StepResult) -> list[int]:
    return np.frombuffer(rig.bytes_of(result.ids), np.int32).tolist()


def test_ready_contains_the_executors_facts(rig: Rig) -> None:
    facts = begin(rig)
    num_blocks, num_tokens = 16 * 1024**2 // 12288, settings().schedule.max_num_batched_tokens
    assert facts == m.ExecuteFacts(
        num_blocks,
        16,
        256,
        VOCAB_SIZE,
        hidden_size=48,
        max_num_prefill_tokens=num_tokens,
        weight_formats="f32",
        kv_dtype="float32",
        kv_groups=[KVGroup(num_layers=3)],
        eos_ids=[2],
        block_bytes=12288,
        backend=m.Backend("torch", code_of_torch(), "float32", "f32", "auto", "float32"),
    )


def test_the_process_for_masks_starts_when_grammars_are_expected(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers without grammars don't have it."""
    started: list[bool] = []
    monkeypatch.setattr("pipeline.stages.execute.grammar_masks.masks.Masks.start", lambda _: started.append(True))
    begin(rig)
    rig.load()
    assert not started
    rig.send(m.ExpectGrammars(), SCHEDULE)
    rig.load()
    assert started == [True]


def test_each_step_is_answered_with_its_result(rig: Rig, tiny_dir: Path) -> None:
    expected = Driver(tiny_dir, settings()).generate([PROMPT], 4)[0]
    begin(rig)
    made = []
    rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3], generation=6)], step_id=1), SCHEDULE)
    for step in range(1, 5):
        result = rig.receive("schedule", m.StepResult)
        assert (result.incarnation, result.step_id) == (1, step)
        assert np.frombuffer(rig.bytes_of(result.rows), np.int32).tolist() == [0]
        assert np.frombuffer(rig.bytes_of(result.generations), np.uint32).tolist() == [6]
        assert rig.bytes_of(result.finishes) == bytes([m.Finish.NONE])
        assert result.compute_s > 0 and result.wait_s >= 0
        made += ids_of(rig, result)
        rig.send(make_step([(0, 4 + step, 1, True)], step_id=step + 1), SCHEDULE)
    assert made == expected


@pytest.fixture
def wakes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages had been sent before each turn. It must come before `rig`, which starts the stage."""
    numbers: list[int] = []
    monkeypatch.setattr(Outbox, "wake", lambda outbox: numbers.append(outbox.num_sent))
    return numbers


def test_the_scheduler_is_woken_before_the_result_is_made(wakes: list[int], rig: Rig) -> None:
    begin(rig)
    rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3])], step_id=1), SCHEDULE)
    rig.receive("schedule", m.StepResult)
    rig.send(make_step([(0, 5, 1, True)], step_id=2), SCHEDULE)
    rig.receive("schedule", m.StepResult)
    assert wakes == [0, 1]


def test_steps_planned_ahead_continue_from_ids_the_scheduler_has_not_seen(rig: Rig, tiny_dir: Path) -> None:
    options = m.GenerationOptions(temperature=2.0, seed=4, ignore_eos=True)
    expected = Driver(tiny_dir, settings()).generate([PROMPT], 3, options=options)[0]
    assert len(set(expected)) == 3
    begin(rig)
    stop = msgspec.structs.replace(options, stop_token_ids=[expected[2]])
    rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3], stop)], step_id=1), SCHEDULE)
    for ahead in range(4):
        rig.send(make_step([(0, 5 + ahead, 1, True)], step_id=2 + ahead), SCHEDULE)
    results = [rig.receive("schedule", m.StepResult) for _ in range(5)]
    assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
    assert [ids_of(rig, result) for result in results] == [[expected[0]], [expected[1]], [expected[2]], [-1], [-1]]
    finishes = [rig.bytes_of(result.finishes)[0] for result in results]
    assert finishes == [m.Finish.NONE, m.Finish.NONE, m.Finish.STOP, m.Finish.NONE, m.Finish.NONE]


def continues_for_a_restarted_schedule(rig: Rig, expected: list[int], options: m.GenerationOptions) -> None:
    """Rows of a dead schedule are dropped, and its successor's continue with the same ids. `expected` are four ids of
    `PROMPT`."""
    begin(rig)
    adds = [row_add(row, PROMPT, [3 + row], options) for row in range(2)]
    rig.send(make_step([(0, 0, 5, True), (1, 0, 5, True)], adds=adds, step_id=1), SCHEDULE)
    rig.send(make_step([(0, 5, 1, True), (1, 5, 1, True)], step_id=2), SCHEDULE)
    results = [rig.receive("schedule", m.StepResult) for _ in range(2)]
    assert [ids_of(rig, result) for result in results] == [[one, one] for one in expected[:2]]
    rig.send(make_step([(0, 6, 1, True), (1, 6, 1, True)], step_id=3), SCHEDULE)
    rig.restart(SCHEDULE)
    assert rig.load() == m.ExecuteLoad(0)
    again = row_add(0, PROMPT + expected[:2], [7], options, num_prompt=5)
    steps = [make_step([(0, 0, 7, True)], adds=[again], step_id=1), make_step([(0, 7, 1, True)], step_id=2)]
    for step in steps:
        rig.send(msgspec.structs.replace(step, incarnation=2), SCHEDULE)
    results = []
    while len(results) < 2:  # schedule ignores results of steps that its predecessor had planned
        result = rig.receive("schedule", m.StepResult)
        results += [result] if result.incarnation == 2 else []
    assert [result.step_id for result in results] == [1, 2]
    assert [ids_of(rig, result) for result in results] == [[one] for one in expected[2:]]


def test_a_restarted_schedule_begins_without_rows(rig: Rig, tiny_dir: Path) -> None:
    options = m.GenerationOptions(temperature=2.0, seed=4, ignore_eos=True)
    expected = Driver(tiny_dir, settings()).generate([PROMPT], 4, options=options)[0]
    continues_for_a_restarted_schedule(rig, expected, options)


def test_a_ping_is_answered_with_the_number_of_live_rows(rig: Rig) -> None:
    begin(rig)
    assert rig.load() == m.ExecuteLoad(0)
    adds = [row_add(row, PROMPT, [row]) for row in range(3)]
    rig.send(make_step([(row, 0, 5, True) for row in range(3)], adds=adds), SCHEDULE)
    rig.receive("schedule", m.StepResult)
    assert rig.load() == m.ExecuteLoad(3)
    rig.send(make_step(drops=[0, 2]), SCHEDULE)
    assert ids_of(rig, rig.receive("schedule", m.StepResult)) == []
    assert rig.load() == m.ExecuteLoad(1)


def test_arrays_in_shared_memory_are_read_and_released_once(tiny_dir: Path, tmp_path: Path) -> None:
    weights = str(tiny_dir / "model.safetensors")
    checkpoints.config_of(max_position=2048, weight_files=[weights]).save(tmp_path)
    ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, 1100).astype(np.int32)
    expected = Driver(tmp_path, settings()).generate([ids.tolist()], 1)[0]
    with Rig("execute", settings(), tmp_path) as rig:
        begin(rig)
        slab = rig.arena(SCHEDULE).put(ids.data.cast("B"), readers=("execute.0",))
        assert isinstance(slab, ShmRef)
        add = msgspec.structs.replace(row_add(0, [], list(range(69))), ids=slab, num_prompt=1100)
        for start in range(0, 1100, 100):
            rig.send(make_step([(0, start, 100, start == 1000)], adds=[add] if start == 0 else []), SCHEDULE)
        release = rig.receive("schedule", m.Release)
        assert (release.offsets, release.generations) == ([slab.offset], [slab.generation])
        results = [rig.receive("schedule", m.StepResult) for _ in range(11)]
        assert [ids_of(rig, result) for result in results] == [[]] * 10 + [expected]
        assert rig.nothing("schedule")


def test_large_results_are_sent_by_reference_and_their_slabs_are_freed(tiny_dir: Path) -> None:
    num = 1100
    config = Settings(
        max_model_len=16,
        execute=ExecuteSettings(dtype="float32", kv_cache_bytes=16 * 1024**2, num_threads=1, arena_bytes=65536),
        schedule=ScheduleSettings(max_num_seqs=num, max_num_batched_tokens=num),
    )
    with Rig("execute", config, tiny_dir) as rig:
        begin(rig)
        for _ in range(6):  # More rounds than fit into the arena.
            adds = [row_add(row, [row % VOCAB_SIZE], [row]) for row in range(num)]
            rig.send(make_step([(row, 0, 1, True) for row in range(num)], adds=adds), SCHEDULE)
            result = rig.receive("schedule", m.StepResult)
            slabs = [result.rows, result.generations, result.ids]
            assert all(isinstance(slab, ShmRef) for slab in slabs)
            assert len(ids_of(rig, result)) == num
            rig.send(m.Release([s.offset for s in slabs], [s.generation for s in slabs], SCHEDULE), SCHEDULE)
            rig.send(make_step(drops=list(range(num))), SCHEDULE)
            rig.receive("schedule", m.StepResult)


def test_an_invalid_step_ends_the_stage(tiny_dir: Path) -> None:
    with pytest.raises(AssertionError, match="not taken"), Rig("execute", settings(), tiny_dir) as rig:
        begin(rig)
        rig.send(make_step([(0, 0, 1, True)]), SCHEDULE)
        rig.receive("schedule", m.StepResult)


def test_an_unusable_model_ends_the_stage_before_it_is_ready(tmp_path: Path) -> None:
    checkpoints.config_of(weight_files=[], num_layers=500, head_dim=64).save(tmp_path)
    with pytest.raises(ValueError, match="kv_cache_bytes"), Rig("execute", settings(kv_mib=1), tmp_path) as rig:
        rig.receive("supervisor", m.Ready)


# --- swap space


def swapping(swap_bytes: int) -> Settings:
    plain = settings(kernels="torch", kv_mib=1)
    return msgspec.structs.replace(plain, execute=msgspec.structs.replace(plain.execute, swap_bytes=swap_bytes))


def test_swapped_blocks_are_in_the_segment_and_are_restored(tiny_dir: Path) -> None:
    expected = Driver(tiny_dir, settings(kernels="torch")).generate([PROMPT], 4)[0]
    with Rig("execute", swapping(3 * 12288 + 5), tiny_dir) as rig:
        facts = begin(rig)
        assert facts.num_swap_blocks == 3
        swap = np.frombuffer(rig.memory("swap"), np.uint8)
        slot = facts.num_blocks + 1
        rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3])], step_id=1), SCHEDULE)
        first = rig.receive("schedule", m.StepResult)
        assert first.copy_s == 0 and not swap.any()
        rig.send(make_step(drops=[0], copies=[(3, slot)], step_id=2), SCHEDULE)
        out = rig.receive("schedule", m.StepResult)
        assert 0 < out.copy_s <= out.compute_s and len(rig.bytes_of(out.rows)) == 0
        assert swap[12288 : 2 * 12288].any() and not swap[:12288].any() and not swap[2 * 12288 :].any()
        ids = [*PROMPT, *ids_of(rig, first)]
        add = row_add(2, ids, [8], num_prompt=5, generation=2)
        rig.send(make_step([(2, 5, 1, True)], adds=[add], copies=[(slot, 8)], step_id=3), SCHEDULE)
        made = ids_of(rig, first) + ids_of(rig, rig.receive("schedule", m.StepResult))
        for position in (6, 7):
            rig.send(make_step([(2, position, 1, True)], step_id=position), SCHEDULE)
            made += ids_of(rig, rig.receive("schedule", m.StepResult))
        assert made == expected
        del swap


def test_lists_of_copies_in_shared_memory_are_released(tiny_dir: Path) -> None:
    with Rig("execute", swapping(3 * 12288), tiny_dir) as rig:
        begin(rig)
        arena = rig.arena(SCHEDULE)
        lists = [arena.put(np.full(1100, block, np.int32).data.cast("B"), readers=("execute.0",)) for block in (4, 5)]
        step = msgspec.structs.replace(make_step(step_id=1), copy_sources=lists[0], copy_targets=lists[1])
        rig.send(step, SCHEDULE)
        assert rig.receive("schedule", m.StepResult).copy_s > 0
        release = rig.receive("schedule", m.Release)
        assert sorted(release.offsets) == sorted(one.offset for one in lists if isinstance(one, ShmRef))


def test_an_executor_with_swap_space_is_recorded_and_replayed(tiny_dir: Path, tmp_path: Path) -> None:
    """The replay has its own swap space, and sends the same messages, including the times of copies."""
    recording, out = tmp_path / "execute.rec", tmp_path / "out.rec"
    with Rig("execute", swapping(3 * 12288), tiny_dir, record=recording) as rig:
        slot = begin(rig).num_blocks
        steps = [
            make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3])], step_id=1),
            make_step(drops=[0], copies=[(3, slot)], step_id=2),
            make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT[::-1], [3])], step_id=3),
            make_step([(1, 5, 1, True)], adds=[row_add(1, [*PROMPT, 9], [8])], copies=[(slot, 8)], step_id=4),
        ]
        for step in steps:
            rig.send(step, SCHEDULE)
        results = [rig.receive("schedule", m.StepResult) for _ in steps]
        assert [result.copy_s > 0 for result in results] == [False, True, False, True]
    replay("execute", recording, out, paced=False, inline=True)
    found = compare(out, recording)
    assert (found.difference, found.num_same) == ("", 4)


def test_an_instant_executor_releases_lists_of_copies_too(tiny_dir: Path) -> None:
    """It has swap blocks if there is swap space, although it stores nothing in them."""
    rig = Rig("execute", swapping(100), tiny_dir)
    rig.launch = msgspec.structs.replace(rig.launch, entry=topology.INSTANT)
    with rig:
        assert begin(rig).num_swap_blocks > 0
        lists = [
            rig.arena(SCHEDULE).put(np.full(1100, block, np.int32).data.cast("B"), readers=("execute.0",))
            for block in (4, 5)
        ]
        rig.send(msgspec.structs.replace(make_step(), copy_sources=lists[0], copy_targets=lists[1]), SCHEDULE)
        assert rig.receive("schedule", m.StepResult).copy_s == 0
        assert sorted(rig.receive("schedule", m.Release).offsets) == sorted(
            one.offset for one in lists if isinstance(one, ShmRef)
        )


def test_an_instant_executor_returns_records_like_a_model(tiny_dir: Path) -> None:
    scored = m.GenerationOptions(num_logprobs=3, num_prompt_logprobs=1)
    pooled, silent = m.GenerationOptions(pooling=m.Pooling.MEAN, num_prompt_logprobs=0), m.GenerationOptions()
    rig = Rig("execute", settings(), tiny_dir)
    rig.launch = msgspec.structs.replace(rig.launch, entry=topology.INSTANT)
    with rig:
        facts = begin(rig)
        adds = [row_add(row, PROMPT, [row], options) for row, options in enumerate((scored, pooled, silent))]
        forked = row_add(3, [], [3], scored, index=1, fork_of=0, num_prompt=len(PROMPT))
        num = len(PROMPT)
        rig.send(make_step([(0, 0, num - 2, False), (1, 0, num, True), (2, 0, num, True)], adds=adds), SCHEDULE)
        rig.send(make_step([(0, num - 2, 2, True), (3, num - 1, 1, True)], adds=[forked], step_id=1), SCHEDULE)
        first, second = (rig.receive("schedule", m.StepResult) for _ in range(2))
        assert len(rig.bytes_of(first.token_outputs)) == embedding_bytes(facts.hidden_size) > 0
        assert len(rig.bytes_of(first.prompt_logprobs)) == (num - 2) * logprob_bytes(1) + (num - 1) * 4
        assert len(rig.bytes_of(second.token_outputs)) == 2 * logprob_bytes(3)
        assert len(rig.bytes_of(second.prompt_logprobs)) == logprob_bytes(1)
