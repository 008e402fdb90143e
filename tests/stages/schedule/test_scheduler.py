"""Exact tokens, and no block lost, for any interleaving of what can happen to a scheduler."""

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import prompt_record_bytes, record_bytes
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.policies.policy import PolicyName
from pipeline.stages.schedule.request_table import MAX_TOMBSTONES
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import PreemptionMode, SchedulerConfig
from tests.fakes import FakeExecutor, expected, next_id, record
from tests.rig import raw

MAX_STEPS = 20_000


class Bench:
    """A scheduler and a fake executor, with what detokenize would have received."""

    def __init__(self, config: SchedulerConfig, depth: int, num_detokenize: int = 1, copy_s: float = 0.0001) -> None:
        self.num_detokenize = num_detokenize
        self.scheduler = Scheduler(config, num_detokenize=num_detokenize)
        self.executor = FakeExecutor(config.num_blocks, num_swap_blocks=config.num_swap_blocks, copy_s=copy_s)
        self.depth = depth
        self.steps: deque[m.Step] = deque()
        self.tables: deque[set[int]] = deque()
        self.opened: dict[int, m.Open] = {}
        self.received: dict[int, list[int]] = {}
        self.records: dict[int, bytes] = {}
        self.prompts: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}
        self.finished: dict[int, Finish] = {}
        self.wanted: dict[int, tuple[m.Admit, m.GenerationOptions]] = {}
        self.refused: list[m.Refuse] = []
        self.in_rows: dict[int, int] = {}
        """Row → sequence, as far as the executor was told."""
        self.begun: set[int] = set()
        """Sequences whose first sampled ids were reported with their times."""
        self._ids = count(1)

    def given(self, seq: int) -> int:
        """Outputs that a sequence came with."""
        admit, _ = self.wanted[seq]
        return len(_bytes(admit.outputs[self.opened[seq].index])) // 4 if admit.outputs else 0

    def admit(
        self,
        prompt: Iterable[int],
        max_tokens: int = 8,
        n: int = 1,
        seed: int = 0,
        stop: Iterable[int] = (),
        request_id: int | None = None,
        arrival_s: float | None = None,
        priority: int = 0,
        salt: str = "",
        num_logprobs: int = -1,
        num_prompt_logprobs: int = -1,
        failing: Iterable[int] = (),
    ) -> int:
        """`num_logprobs` and `num_prompt_logprobs` at -1 want no records; at the ids `failing` the executor fails."""
        number = next(self._ids)
        options = m.GenerationOptions(
            n=n,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=list(stop),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            bias_ids=list(failing),
            priority=priority,
            cache_salt=salt,
        )
        message = m.Admit(
            request_id=request_id or number,
            attempt=1,
            gateway=0,
            arrival_s=float(number) if arrival_s is None else arrival_s,
            prompt_ids=np.array(list(prompt), np.int32).tobytes(),
            options=raw(options),
        )
        for told in self.scheduler.admit(message):
            if isinstance(told, m.Refuse):
                self.refused.append(told)
            else:
                self.opened[told.seq] = told
                self.received[told.seq] = []
                self.records[told.seq] = self.prompts[told.seq] = b""
                self.wanted[told.seq] = (message, options)
        return message.request_id

    def fill(self) -> None:
        while len(self.steps) < self.depth:
            num_preemptions = self.scheduler.load().num_preemptions
            step = self.scheduler.plan()
            if step is None:
                return
            dropped = {self.in_rows.pop(row) for row in np.frombuffer(_bytes(step.drops), np.int32).tolist()}
            added = {add.row: self.scheduler.rows.sequences[add.row] for add in step.adds}
            self.in_rows |= {row: sequence.seq for row, sequence in added.items() if sequence is not None}
            if self.scheduler.load().num_preemptions > num_preemptions:
                assert dropped.isdisjoint(self.in_rows[row] for row in added), "put back and started by one plan"
            self.steps.append(step)
            self.tables.append(self._tables(step))

    def answer(self) -> None:
        self.tables.popleft()
        self.scheduler.settle(self.executor.run(self.steps.popleft()))

    def _tables(self, step: m.Step) -> set[int]:
        """The blocks that a step names: the tables of the rows it computes."""
        rows = self.scheduler.rows
        return {
            block
            for row in np.frombuffer(_bytes(step.rows), np.int32).tolist()
            for block in rows.table[row, : rows.num_blocks[row]].tolist()
        }

    def check(self) -> None:
        """Every invariant; and no block that a step in flight names is anybody's to take."""
        self.scheduler.check()
        pool = self.scheduler.kv_cache_manager.pool
        for blocks in self.tables:
            assert all(pool.num_refs(block) > 0 for block in blocks), "a step in flight names a block that was released"
        swap = self.scheduler.kv_cache_manager.swap
        for step in self.steps:
            assert swap.free.isdisjoint(np.frombuffer(_bytes(step.copy_sources), np.int32).tolist()), (
                "a step in flight copies from a swap block that is free"
            )

    def report(self, sent: bool = True) -> None:
        """Tell every replica of detokenize, or find each of their edges full."""
        for replica in range(self.num_detokenize):
            self.report_to(replica, sent)

    def report_to(self, replica: int, sent: bool) -> None:
        message = self.scheduler.output_buffer.pending(replica)
        if message is None or not sent:
            return
        self.scheduler.output_buffer.mark_sent(replica)
        ids = np.frombuffer(_bytes(message.ids), np.int32).tolist()
        seqs = np.frombuffer(_bytes(message.seqs), np.uint64).tolist()
        for first in message.firsts:
            assert seqs[first.place] not in self.begun, "a sequence has two first ids"
            self.begun.add(seqs[first.place])
        for seq, start, data in zip(message.prompt_seqs, message.prompt_starts, message.prompt_records, strict=True):
            assert seq not in self.finished, "a prompt was told of after the closing"
            width = prompt_record_bytes(self.wanted[seq][1])
            assert start * width == len(self.prompts[seq]) and len(data) % width == 0
            self.prompts[seq] += data
        records, errors = _bytes(message.records), iter(message.errors)
        for seq, start, num, finish in zip(
            np.frombuffer(_bytes(message.seqs), np.uint64).tolist(),
            np.frombuffer(_bytes(message.starts), np.int32).tolist(),
            np.frombuffer(_bytes(message.counts), np.int32).tolist(),
            np.frombuffer(_bytes(message.finishes), np.uint8).tolist(),
            strict=True,
        ):
            assert seq % self.num_detokenize == replica, "a sequence belongs to one replica"
            assert seq not in self.finished, "an entry came after the closing"
            assert start == len(self.received[seq]), "ids were lost or repeated"
            self.received[seq] += ids[:num]
            ids = ids[num:]
            num_bytes = num * record_bytes(self.wanted[seq][1], hidden_size=0)
            self.records[seq] += records[:num_bytes]
            records = records[num_bytes:]
            if finish != Finish.NONE:
                self.finished[seq] = Finish(finish)
            if finish == Finish.ERROR:
                self.errors[seq] = next(errors)
        assert not ids and not records and next(errors, None) is None
        assert self.begun == {seq for seq in self.received if len(self.received[seq]) > self.given(seq)}

    def run(self) -> int:
        """Run until there is nothing to do, in the stage's order: settle, plan, report. Returns the number of steps."""
        self.fill()
        for steps in range(MAX_STEPS):
            if not self.steps:
                self.report()
                return steps
            self.answer()
            self.fill()
            self.report()
        raise AssertionError("it never ends")

    def check_outputs(self) -> None:
        """Every sequence that ended by itself has exactly its ids; one that was aborted, a beginning of them."""
        for seq, finish in self.finished.items():
            message, options = self.wanted[seq]
            prompt = np.frombuffer(_bytes(message.prompt_ids), np.int32).tolist()
            limit = min(options.max_tokens, self.scheduler.config.max_model_len - len(prompt))
            index = self.opened[seq].index
            ids, natural = expected(prompt, options, index, limit)
            if any(fails := [token_id in options.bias_ids for token_id in ids]):
                ids, natural = ids[: fails.index(True)], Finish.ERROR
            if options.num_logprobs >= 0:
                assert self.records[seq] == b"".join(record(one, options.num_logprobs) for one in self.received[seq])
            told = b""
            if options.num_prompt_logprobs >= 0 and index == 0:
                told = b"".join(record(one, options.num_prompt_logprobs) for one in prompt[1:])
            assert self.prompts[seq] == told or (not self.received[seq] and told.startswith(self.prompts[seq]))
            assert (finish == Finish.ERROR) == (seq in self.errors)
            if finish == Finish.ABORT:
                assert self.received[seq] == ids[: len(self.received[seq])]
            else:
                assert (self.received[seq], finish) == (ids, natural)

    def abort(self, request_id: int, index: int = -1) -> None:
        self.scheduler.abort(m.Abort(request_id, 1, index))

    def close_all(self) -> None:
        for request_id in list(self.scheduler.requests):
            self.scheduler.close(m.Closed(request_id, 1))


def _bytes(array: Any) -> bytes:
    assert isinstance(array, bytes)
    return array


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return SchedulerConfig(**(values | changes))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_sequence_generates_exactly_its_ids(depth: int) -> None:
    bench = Bench(config(), depth)
    bench.admit(range(50), max_tokens=40)
    bench.run()
    bench.check_outputs()
    assert list(bench.finished.values()) == [Finish.LENGTH]
    assert len(bench.received[1]) == 40


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_stop_id_ends_a_sequence_and_later_steps_in_flight_add_nothing(depth: int) -> None:
    prompt = list(range(20))
    ids, _ = expected(prompt, m.GenerationOptions(), 0, 6)
    bench = Bench(config(), depth)
    bench.admit(prompt, max_tokens=40, stop=[ids[5]])
    assert bench.run() == 6 + depth - 1, "those that were in flight when it came"
    assert bench.received[1] == ids
    assert bench.finished[1] == Finish.STOP


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_length_stop_wastes_no_step_at_any_depth(depth: int) -> None:
    bench = Bench(config(), depth)
    bench.admit(range(10), max_tokens=5)
    assert bench.run() == 5


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    bench = Bench(config(max_num_batched_tokens=32), depth=1)
    bench.admit(range(8), max_tokens=30)
    bench.fill()
    bench.answer()
    bench.admit(range(100, 300), max_tokens=2)
    for _ in range(6):
        bench.fill()
        step = bench.steps[0]
        counts = np.frombuffer(_bytes(step.counts), np.int32).tolist()
        assert counts == [1, 31], "the decoding row goes first, the prompt takes the rest of the budget"
        bench.answer()
        bench.report()
    bench.run()
    bench.check_outputs()


def test_no_step_exceeds_the_budget() -> None:
    bench = Bench(config(max_num_batched_tokens=16, max_num_seqs=8), depth=2)
    for number in range(20):
        bench.admit(range(number, number + 37), max_tokens=9)
    while True:
        bench.fill()
        if not bench.steps:
            break
        assert np.frombuffer(_bytes(bench.steps[-1].counts), np.int32).sum() <= 16
        bench.answer()
        bench.report()
    bench.check_outputs()


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    bench = Bench(config(), depth=1)
    bench.admit(range(100), max_tokens=4)
    bench.run()
    bench.admit(range(100), max_tokens=4)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 96, "six full blocks; what is left is computed"


def test_a_prompt_of_full_blocks_still_computes_its_last_id() -> None:
    bench = Bench(config(), depth=1)
    for _ in range(2):
        bench.admit(range(64), max_tokens=4)
        bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 48


def test_generated_blocks_are_found_by_the_next_turn_of_a_chat() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(range(30), max_tokens=40)
    bench.run()
    turn = [*range(30), *bench.received[1], 5, 6, 7]
    bench.admit(turn, max_tokens=4)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 64, "the last id of 70 was never computed"


def test_nothing_is_cached_where_prefix_caching_is_off() -> None:
    bench = Bench(config(prefix_caching=False), depth=1)
    for _ in range(2):
        bench.admit(range(64), max_tokens=4)
        bench.run()
    load = bench.scheduler.load()
    assert (load.num_cached_tokens, load.num_blocks_cached, load.num_blocks_free) == (0, 0, 64)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [97, 96, 100, 111, 15, 1])
def test_parallel_samples_fork_from_the_first_and_compute_one_position_of_the_prompt(
    length: int, depth: int, caching: bool
) -> None:
    bench = Bench(config(max_num_batched_tokens=256, prefix_caching=caching), depth)
    bench.admit(range(length), max_tokens=4, n=4)
    bench.fill()
    assert bench.scheduler.num_running == min(4, depth**2), "the siblings wait until the prompt is computed"
    num_shared = (length - 1) // 16
    num_own = -(-(length + depth - 1) // 16) - num_shared  # what a step in flight will sample has its place already
    assert bench.scheduler.kv_cache_manager.pool.num_held <= num_shared + 4 * num_own, "its full blocks are there once"
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_cached_tokens == 3 * (length - 1)
    found_anyway = (length - 1) % 16 == 0 and (caching or length == 1)
    assert load.num_forks == (0 if found_anyway else 3)
    assert bench.executor.num_copies == (3 if (length - 1) % 16 else 0), "the block that all of them write to"
    assert len({tuple(ids) for ids in bench.received.values()}) == 4, "each has noise of its own"


def test_a_parallel_sample_whose_leader_is_gone_computes_the_prompt_itself() -> None:
    bench = Bench(config(max_num_seqs=1, prefix_caching=False), depth=1)
    bench.admit(range(40), max_tokens=3, n=3)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_forks == 0


def test_parallel_samples_wait_for_a_prompt_in_chunks_while_others_start() -> None:
    bench = Bench(config(max_num_batched_tokens=32), depth=1)
    bench.admit(range(60), max_tokens=4, n=2)
    bench.admit(range(500, 504), max_tokens=4)
    bench.fill()
    bench.answer()
    bench.fill()
    assert [add.request_id for add in bench.steps[0].adds] == [2], "28 of the prompt's ids are left, so there is room"
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_forks == 1


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    bench = Bench(config(num_blocks=10, max_num_seqs=1), depth=1)
    for first in (0, 1000, 0, 2000):  # three full blocks each; the third touches the first again
        bench.admit(range(first, first + 60), max_tokens=4)
        bench.run()
    bench.admit(range(3000, 3060), max_tokens=4)
    bench.run()
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(range(60), max_tokens=4)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens - before == 48, "kept: it was used after the others"
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(range(1000, 1060), max_tokens=4)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens == before, "evicted: it was used longest ago"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_when_blocks_run_out_the_youngest_is_preempted_and_ends_with_the_same_ids(depth: int) -> None:
    bench = Bench(config(num_blocks=10, max_num_seqs=4, max_model_len=160), depth)
    for number in range(4):
        bench.admit(range(number * 50, number * 50 + 20), max_tokens=90)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions > 0
    assert len(bench.finished) == 4
    assert bench.scheduler.load().num_blocks_held == 0


@pytest.mark.parametrize("depth", [2, 4])
def test_who_came_first_ends_first_though_memory_is_short(depth: int) -> None:
    bench = Bench(config(num_blocks=8, max_num_seqs=8, max_model_len=128), depth)
    for number in range(12):
        bench.admit(range(number, number + 30), max_tokens=60)
    bench.run()
    assert list(bench.finished) == sorted(bench.finished), "equal requests end in the order in which they came"


def test_a_preempted_sequence_tells_its_ids_before_it_waits() -> None:
    bench = Bench(config(num_blocks=4, max_num_seqs=2, max_model_len=64), depth=1)
    bench.admit(range(14), max_tokens=40)
    bench.admit(range(100, 114), max_tokens=40)
    while bench.scheduler.load().num_preemptions == 0:
        bench.fill()
        bench.answer()
        bench.fill()
        bench.report()
        for seq, ids in bench.received.items():
            message, options = bench.wanted[seq]
            prompt = np.frombuffer(_bytes(message.prompt_ids), np.int32).tolist()
            assert ids == expected(prompt, options, 0, len(ids))[0]
    assert len(bench.received[2]) == len(bench.received[1])


def test_a_request_that_can_never_fit_is_refused() -> None:
    bench = Bench(config(num_blocks=4, max_model_len=256), depth=1)
    bench.admit(range(60), max_tokens=60)
    assert "8 KV blocks" in bench.refused[0].failure.message
    assert bench.refused[0].failure.status == 400
    assert not bench.scheduler.requests


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_an_abort_frees_blocks_when_the_last_step_in_flight_is_settled(depth: int) -> None:
    bench = Bench(config(prefix_caching=False), depth)
    request = bench.admit(range(40), max_tokens=100)
    bench.fill()
    bench.answer()
    bench.fill()
    bench.scheduler.abort(m.Abort(request, 1))
    assert bench.scheduler.load().num_running == 0
    for _ in range(depth):
        assert bench.scheduler.load().num_blocks_held == 3, "a step in flight names them still"
        bench.answer()
    bench.report()
    assert bench.scheduler.load().num_blocks_held == 0
    assert bench.finished[1] == Finish.ABORT


def test_an_abort_of_the_waiting_takes_no_step() -> None:
    bench = Bench(config(max_num_seqs=1), depth=1)
    bench.admit(range(10), max_tokens=50)
    second = bench.admit(range(10), max_tokens=50)
    bench.fill()
    bench.scheduler.abort(m.Abort(second, 1))
    bench.report()
    assert bench.finished == {2: Finish.ABORT}
    bench.run()
    bench.check_outputs()


def test_an_abort_is_idempotent() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=50)
    for _ in range(3):
        bench.scheduler.abort(m.Abort(request, 1))
    bench.report()
    assert bench.finished == {1: Finish.ABORT}


def test_an_abort_that_overtakes_its_request_is_answered_when_that_comes() -> None:
    bench = Bench(config(), depth=1)
    bench.scheduler.abort(m.Abort(77, 1))
    bench.admit(range(10), request_id=77)
    assert bench.refused[0].failure.code == "aborted"
    bench.admit(range(10), request_id=77)
    bench.run()
    assert bench.finished == {1: Finish.LENGTH}, "a tombstone is for one request"


def test_a_stop_string_ends_one_sequence_of_n_and_leaves_the_others() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=20, n=3)
    bench.fill()
    bench.answer()
    bench.scheduler.abort(m.Abort(request, 1, index=1, finish=Finish.STOP))
    bench.run()
    assert [bench.finished[seq] for seq in (1, 2, 3)] == [Finish.LENGTH, Finish.STOP, Finish.LENGTH]


def test_what_a_full_socket_refused_goes_with_the_next_report() -> None:
    bench = Bench(config(), depth=1)
    bench.admit(range(10), max_tokens=9)
    for turn in range(9):
        bench.fill()
        bench.answer()
        bench.report(sent=turn % 4 == 3)
    bench.report()
    bench.check_outputs()
    assert bench.finished == {1: Finish.LENGTH}


def test_the_log_of_a_finished_request_stays_until_closed() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10))
    bench.run()
    assert request in bench.scheduler.requests
    bench.scheduler.close(m.Closed(request, 1))
    assert not bench.scheduler.requests


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_row_goes_to_another_while_steps_of_its_former_owner_are_in_flight(depth: int) -> None:
    """What they sample for it is nobody's, and what they write is in blocks that nobody else has."""
    bench = Bench(config(max_num_seqs=1, num_blocks=12, prefix_caching=False), depth)
    for number in range(5):
        request = bench.admit(range(number * 100, number * 100 + 20), max_tokens=60)
        bench.fill()
        bench.answer()
        bench.fill()
        bench.check()
        if number < 4:
            bench.abort(request)
            assert bench.scheduler.num_running == 0 and len(bench.steps) == depth
    bench.run()
    bench.check_outputs()
    assert [bench.finished[seq] for seq in range(1, 6)] == [Finish.ABORT] * 4 + [Finish.LENGTH]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_who_comes_in_at_depth_waits_for_the_steps_in_flight_and_no_longer(depth: int) -> None:
    bench = Bench(config(), depth)
    bench.admit(range(10), max_tokens=60)
    bench.fill()
    late = bench.admit(range(100, 110), max_tokens=5)
    num_steps = 0
    while not bench.received[late]:
        bench.answer()
        bench.fill()
        bench.report()
        num_steps += 1
    assert num_steps == depth + 1
    bench.run()
    bench.check_outputs()


def test_an_id_for_the_wrong_step_is_a_broken_invariant() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(range(10))
    bench.fill()
    bench.executor.run(bench.steps.popleft())
    with pytest.raises(AssertionError, match="a result of step 2 came, step 1 is due"):
        bench.scheduler.settle(bench.executor.run(bench.steps.popleft()))


def test_a_fake_id_depends_on_every_id_before_it() -> None:
    assert next_id([1, 2, 3], 0, 0) != next_id([2, 2, 3], 0, 0)


def test_a_half_computed_prompt_that_is_aborted_lends_only_what_was_computed() -> None:
    bench = Bench(config(max_num_batched_tokens=32), depth=1)
    first = bench.admit(range(100))
    bench.fill()
    bench.answer()
    bench.scheduler.abort(m.Abort(first, 1))
    bench.admit(range(100))
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 32


def test_when_part_of_a_prompt_is_evicted_its_head_is_still_found() -> None:
    bench = Bench(config(num_blocks=8, max_num_seqs=1), depth=1)
    bench.admit(range(97), max_tokens=1)  # seven blocks, six of them full
    bench.run()
    bench.admit(range(500, 540), max_tokens=4)  # takes the free ones, and a cached one
    bench.run()
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(range(97), max_tokens=1)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens - before == 80, "the tail was evicted, not the head"


def test_a_newcomer_leaves_running_sequences_their_next_blocks() -> None:
    bench = Bench(config(num_blocks=12, max_num_seqs=8), depth=1)
    for number in range(4):
        bench.admit(range(number * 100, number * 100 + 30), max_tokens=18)  # two blocks now, three in the end
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions == 0


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_row_is_preempted_for_a_block_that_is_about_to_be_released(depth: int) -> None:
    bench = Bench(config(num_blocks=5, max_num_seqs=3, max_model_len=64, prefix_caching=False), depth)
    bench.admit(range(16), max_tokens=30)
    bench.admit(range(100, 116), max_tokens=2)
    bench.run()
    assert bench.scheduler.load().num_preemptions == 0
    bench.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_row_used_again_still_fills_the_prefix_cache(depth: int) -> None:
    bench = Bench(config(max_num_seqs=1), depth)
    bench.admit(range(200, 260), max_tokens=2)
    bench.run()
    for _ in range(2):
        bench.admit(range(60), max_tokens=2)
        bench.run()
    assert bench.scheduler.load().num_cached_tokens == 48


def test_the_longest_prompt_leaves_room_for_one_id_and_a_longer_one_is_refused() -> None:
    bench = Bench(config(max_model_len=64), depth=1)
    bench.admit(range(63), max_tokens=10)
    bench.admit(range(64), max_tokens=10)
    bench.run()
    assert len(bench.received[1]) == 1
    assert bench.finished[1] == Finish.LENGTH
    assert bench.refused[0].failure.status == 400
    assert len(bench.opened) == 1


def test_the_last_id_needs_no_block_for_it_is_never_computed() -> None:
    bench = Bench(config(num_blocks=4, max_model_len=80), depth=1)
    bench.admit(range(60), max_tokens=5)
    bench.run()
    bench.check_outputs()
    assert bench.finished == {1: Finish.LENGTH}


def test_an_abort_of_an_older_attempt_leaves_the_newer_alone() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=4)
    bench.scheduler.abort(m.Abort(request, 0))
    bench.run()
    assert bench.finished == {1: Finish.LENGTH}


def test_closing_an_open_request_ends_its_sequences() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=40, n=2)
    bench.fill()
    bench.answer()
    bench.scheduler.close(m.Closed(request, 1))
    bench.run()
    assert bench.finished == {1: Finish.ABORT, 2: Finish.ABORT}
    assert not bench.scheduler.requests


def test_closing_removes_the_tombstone() -> None:
    bench = Bench(config(), depth=1)
    bench.scheduler.abort(m.Abort(5, 1))
    bench.scheduler.close(m.Closed(5, 1))
    bench.admit(range(10), request_id=5)
    assert not bench.refused


def test_tombstones_are_bounded() -> None:
    bench = Bench(config(), depth=1)
    for request in range(MAX_TOMBSTONES + 1):
        bench.scheduler.abort(m.Abort(10 + request, 1))
    bench.admit(range(10), request_id=10)
    bench.admit(range(10), request_id=11)
    assert [refusal.request_id for refusal in bench.refused] == [11], "the oldest was forgotten"


PROMPTS = st.one_of(
    st.integers(1, 90).map(lambda length: list(range(length))),  # all share a prefix
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
)


class Histories(RuleBasedStateMachine):
    """Any history of admissions, aborts, steps and refused reports, at any depth and with any limits."""

    @initialize(
        depth=st.integers(1, 4),
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([16, 24, 64, 200]),
        prefix_caching=st.booleans(),
        num_detokenize=st.integers(1, 3),
        num_swap_blocks=st.sampled_from([0, 3, 30]),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        policy=st.sampled_from(["fcfs", "priority", "longest-prefix-match"]),
        copy_s=st.sampled_from([0.0001, 0.02]),
        long_prompt_tokens=st.sampled_from([20, 1000]),
        bounds_s=st.sampled_from([(float("inf"), float("inf")), (0.02, 2.0), (float("inf"), 1.2), (0.003, 1.2)]),
    )
    def start(
        self,
        depth: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        prefix_caching: bool,
        num_detokenize: int,
        num_swap_blocks: int,
        preemption: PreemptionMode,
        policy: PolicyName,
        copy_s: float,
        long_prompt_tokens: int,
        bounds_s: tuple[float, float],
    ) -> None:
        self.bench = Bench(
            SchedulerConfig(
                num_blocks=num_blocks,
                max_model_len=128,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                prefix_caching=prefix_caching,
                num_swap_blocks=num_swap_blocks,
                preemption=preemption,
                policy=policy,
                max_step_s=bounds_s[0],
                long_prompt_tokens=long_prompt_tokens,
                long_prompt_max_slowdown=bounds_s[1],
            ),
            depth,
            num_detokenize,
            copy_s,
        )
        self.known: list[int] = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 40),
        n=st.integers(1, 3),
        seed=st.integers(0, 1),
        stop=st.lists(st.integers(0, 996), max_size=150),
        late=st.booleans(),
        priority=st.integers(-1, 2),
        salt=st.sampled_from(["", "", "mine"]),
        tops=st.sampled_from([(-1, -1), (-1, -1), (0, -1), (2, -1), (-1, 0), (1, 2)]),
        failing=st.sampled_from([(), (), (), range(0, 997, 13)]),
    )
    def admit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        seed: int,
        stop: list[int],
        late: bool,
        priority: int,
        salt: str,
        tops: tuple[int, int],
        failing: Iterable[int],
    ) -> None:
        number = self.bench.admit(
            prompt,
            max_tokens,
            n,
            seed,
            stop,
            arrival_s=0.5 if late else None,
            priority=priority,
            salt=salt,
            num_logprobs=tops[0],
            num_prompt_logprobs=tops[1],
            failing=failing,
        )
        self.known.append(number)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), index=st.sampled_from([-1, -1, 0, 1]))
    def abort(self, data: st.DataObject, index: int) -> None:
        self.bench.scheduler.abort(m.Abort(data.draw(st.sampled_from(self.known)), 1, index))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.bench.scheduler.close(m.Closed(data.draw(st.sampled_from(self.known)), 1))

    @rule(prompt=PROMPTS)
    def abort_before_it_comes(self, prompt: list[int]) -> None:
        request = 1_000_000 + len(self.bench.refused)
        self.bench.scheduler.abort(m.Abort(request, 1))
        self.bench.admit(prompt, request_id=request)
        assert self.bench.refused[-1].request_id == request

    @rule()
    def reset_prefix_cache(self) -> None:
        pool = self.bench.scheduler.kv_cache_manager.pool
        num_cached = pool.num_cached
        assert self.bench.scheduler.reset_prefix_cache() >= num_cached
        assert pool.num_cached == 0

    @rule()
    def fill(self) -> None:
        self.bench.fill()

    @precondition(lambda self: self.bench.steps)
    @rule()
    def answer(self) -> None:
        self.bench.answer()

    @rule(sent=st.booleans(), replica=st.integers(0, 2))
    def report(self, sent: bool, replica: int) -> None:
        self.bench.report_to(replica % self.bench.num_detokenize, sent)

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            if self.bench.steps:
                self.bench.answer()
            self.bench.fill()
            self.bench.report()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        while bench.steps:
            bench.answer()
        bench.run()
        bench.check_outputs()
        assert set(bench.finished) == set(bench.opened), "each opening has exactly one closing"
        load = bench.scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_swapped, load.num_blocks_held) == (0, 0, 0, 0)
        assert load.num_swap_blocks_free == load.num_swap_blocks_total
        bench.scheduler.check()
        bench.close_all()
        assert not bench.scheduler.requests


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_depth_changes_no_token(data: st.DataObject) -> None:
    load = data.draw(st.lists(st.tuples(PROMPTS, st.integers(1, 40)), min_size=1, max_size=8))
    outputs = []
    for depth in (1, 2, 3, 4):
        bench = Bench(config(num_blocks=9, max_model_len=128), depth)
        for prompt, max_tokens in load:
            bench.admit(prompt, max_tokens)
        bench.run()
        outputs.append(bench.received)
    assert all(other == outputs[0] for other in outputs)
