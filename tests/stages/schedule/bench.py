"""A scheduler with a fake executor, for tests."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.process.black_box import NUM_BYTES, SuspectList, suspects_in
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.stages.schedule.kv_cache.block_index import HEADER_BYTES, IndexMemory
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.kv_cache.prefix import KEY_BYTES
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.stages.schedule.state import SchedulerContext
from pipeline.supervisor.crashes.crash_counts import CrashCounts
from tests.fakes import FakeExecutor, expected, inline, record
from tests.rig import raw
from tests.stages.schedule.front_stages import FrontStages

MAX_STEPS = 20_000


class Bench:
    """A scheduler and a fake executor, and everything that detokenize would have received."""

    def __init__(self, config: SchedulerConfig, depth: int, num_detokenize: int = 1, copy_s: float = 0.0001) -> None:
        self.num_detokenize = num_detokenize
        width = KEY_BYTES + (len(config.kv_groups) > 1)
        self.indices = [bytearray(HEADER_BYTES + width * num) for num in (config.num_blocks, config.num_swap_blocks)]
        """Of the KV cache, of swap space, and of the states in both; they outlive the scheduler."""
        states = config.states
        self.indices += [bytearray(HEADER_BYTES + KEY_BYTES * num) for num in (states.num_slots, states.num_swap_slots)]
        self.crash_counts = CrashCounts()
        self.black_box = memoryview(bytearray(NUM_BYTES))
        self.num_executors = 1
        self.scheduler = self._scheduler(config)
        self.executor = self._executor(copy_s)
        self.front = FrontStages(config)
        self.depth = max(depth, config.num_stages)
        self.plans_early = False
        """Whether a step may be planned before the result of the one before is settled, as the stage does."""
        self.num_early_plans = 0
        self.early_flags = 0
        """The flags of the rows of steps, before whose results others were planned."""
        self.num_repeats = 0
        """How many of these repeated a step of a decode run."""
        self.steps: deque[m.Step] = deque()
        self.tables: deque[set[int]] = deque()
        self.opened: dict[int, m.Open] = {}
        self.received: dict[int, list[int]] = {}
        self.token_outputs: dict[int, bytes] = {}
        self.prompts: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}
        self.finished: dict[int, Finish] = {}
        self.admitted: dict[int, tuple[m.Admit, m.GenerationOptions]] = {}
        self.refused: list[m.Reject] = []
        self.in_rows: dict[int, int] = {}
        """Row → sequence, in the executor's state."""
        self.drafts: dict[int, tuple[int, int]] = {}
        """Accepted and rejected ids of each sequence that has them counted."""
        self.last_use: m.UseAdapters | None = None
        """The last message to the executor about LoRA adapters."""
        self.begun: set[int] = set()
        """Sequences whose first sampled ids were reported with their times."""
        self._ids = count(1)

    def _executor(self, copy_s: float) -> FakeExecutor:
        config = self.scheduler.config
        return FakeExecutor(
            config.num_blocks,
            num_swap_blocks=config.num_swap_blocks,
            copy_s=copy_s,
            groups=config.kv_groups,
            num_state_slots=config.states.num_slots,
            num_swap_state_slots=config.states.num_swap_slots,
        )

    def _scheduler(self, config: SchedulerConfig) -> Scheduler:
        kv_index, swap_index, *state_indices = (IndexMemory(memoryview(memory)) for memory in self.indices)
        return Scheduler(
            config,
            SchedulerContext(
                num_detokenize=self.num_detokenize,
                kv_index=kv_index,
                swap_index=swap_index,
                state_index=state_indices[0],
                swap_state_index=state_indices[1],
                executor=self.num_executors,
                crash_counts=self.crash_counts.of("schedule"),
                suspects=SuspectList(self.black_box),
            ),
        )

    def given(self, seq: int) -> int:
        """The number of output ids that a sequence was resumed with."""
        admit, _ = self.admitted[seq]
        return len(inline(admit.outputs[self.opened[seq].index])) // 4 if admit.outputs else 0

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
        predicted_ids: bytes = b"",
        num_crashes: int = 0,
        outputs: Iterable[int] = (),
        attempt: int = 1,
        cut_positions: Iterable[int] = (),
        **others: Any,
    ) -> int:
        """-1 in `num_logprobs` or `num_prompt_logprobs` requests no records; the executor fails at the ids
        `failing`. `others` are further options."""
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
            predicted_ids=predicted_ids,
            **others,
        )
        return self.admit_options(prompt, options, request_id, arrival_s, num_crashes, outputs, attempt, cut_positions)

    def admit_options(
        self,
        prompt: Iterable[int],
        options: m.GenerationOptions,
        request_id: int | None = None,
        arrival_s: float | None = None,
        num_crashes: int = 0,
        outputs: Iterable[int] = (),
        attempt: int = 1,
        cut_positions: Iterable[int] = (),
    ) -> int:
        """Admit a request that has these options, a suspect of `num_crashes` of schedule. Returns its id."""
        number = next(self._ids)
        if num_crashes:
            self.scheduler.lifecycle.quarantine._crash_counts[request_id or number] = num_crashes
        message = m.Admit(
            request_id=request_id or number,
            attempt=attempt,
            gateway=0,
            arrival_s=float(number) if arrival_s is None else arrival_s,
            prompt_ids=np.array(list(prompt), np.int32).tobytes(),
            options=raw(options),
            outputs=[np.array(list(outputs), np.int32).tobytes()] if outputs else [],
            finishes=bytes(1) if outputs else b"",
            cut_positions=list(cut_positions),
        )
        for reply in self.scheduler.admit(message):
            if isinstance(reply, m.Reject):
                self.refused.append(reply)
            else:
                self.opened[reply.seq] = reply
                self.received[reply.seq] = list(outputs)
                self.token_outputs[reply.seq] = self.prompts[reply.seq] = b""
                self.admitted[reply.seq] = (message, options)
        return message.request_id

    def load_adapters(self, num: int | None = None) -> None:
        """The executor answers: it has loaded the adapters of the last message, or the first `num`."""
        if (use := self.scheduler.use_adapters()) is not None:
            self.last_use = use
        if self.last_use is not None:
            loaded = self.last_use.adapter_ids[:num]
            self.scheduler.adapters_loaded(m.AdaptersLoaded(self.last_use.incarnation, self.last_use.number, loaded))

    def fill(self) -> None:
        while len(self.steps) < self.depth and self._plan(self.scheduler.plan):
            pass
        if not self.steps and self.scheduler.lifecycle.quarantine.is_cleared:
            self.report()
            self.fill()

    def _plan(self, plan: Callable[[], m.Step | None]) -> bool:
        """Plan a step. Returns False if there is nothing to compute now."""
        num_preemptions = self.scheduler.load().num_preemptions
        step = plan()
        if step is None:
            return False
        dropped = {self.in_rows.pop(row) for row in np.frombuffer(inline(step.drops), np.int32).tolist()}
        added = {add.row: self.scheduler.rows.sequences[add.row] for add in step.adds}
        self.in_rows |= {row: sequence.seq for row, sequence in added.items() if sequence is not None}
        if self.scheduler.load().num_preemptions > num_preemptions:
            started = {
                self.in_rows[row]
                for row, sequence in added.items()
                if sequence and sequence.request.beam_search is None
            }
            assert dropped.isdisjoint(started), "preempted and started by one plan"
        self.front.take(step)
        self.steps.append(step)
        self.tables.append(self._tables(step))
        return True

    def answer(self) -> None:
        """Compute a step and settle its result; as the stage does, plan before that if it is possible."""
        self.tables.popleft()
        is_full = len(self.steps) == self.depth
        result = self._compute()
        if is_full and self.plans_early and self.scheduler.can_plan_before_settling(result):
            self.early_flags |= self.scheduler.in_flight[0].flags
            self.num_early_plans += self._plan(self.scheduler.plan_before_settling)
            self.num_repeats += self.scheduler.in_flight[-1].run is not None
        self.scheduler.settle(result)

    def _compute(self) -> m.StepResult:
        result = self.executor.run(self.steps.popleft())
        self.front.computed(result)
        return result

    def _tables(self, step: m.Step) -> set[int]:
        """The blocks that a step uses: the tables of its rows."""
        rows = self.scheduler.rows
        return {block for row in np.frombuffer(inline(step.rows), np.int32).tolist() for block in rows.blocks_of(row)}

    def check(self) -> None:
        """Check all invariants, and that no block of a step in flight is free."""
        self.scheduler.check()
        pool = self.scheduler.kv_cache_manager.pool
        for blocks in self.tables:
            assert all(pool.num_refs(block) > 0 for block in blocks), "a step in flight uses a block that was released"
        swap, first_swap_id = self.scheduler.kv_cache_manager.swap, pool.num_total
        for step in self.steps:
            for source in np.frombuffer(inline(step.copy_sources), np.int32).tolist():
                assert source < first_swap_id or swap.num_refs(source - first_swap_id) > 0, (
                    "a step in flight copies from a swap block that is free"
                )

    def lose_executor(self, num_run: int, *, keeps_swap: bool = True, has_crashed: bool = True) -> None:
        """The executor dies when it has run `num_run` of the steps in flight; their results are lost."""
        for step in list(self.steps)[:num_run]:
            self.executor.run(step)
        self.steps.clear()
        self.tables.clear()
        self.in_rows.clear()
        swap = self.executor.kv[self.executor.num_blocks :].copy()
        swap_states = self.executor.states[self.executor.num_state_slots :]
        self.executor = self._executor(self.executor.copy_s)
        self.front = self.front.successors(self.scheduler.config, keeps_kv=False)
        self.executor.kv[self.executor.num_blocks :] = swap
        self.executor.states[self.executor.num_state_slots :] = swap_states
        self.num_executors += 1
        self.last_use = None
        if has_crashed and (failing := self.crash_counts.crashed("execute", self.suspects)) is not None:
            self.scheduler.fail(failing.errors)
        self.scheduler.executor_lost(ExecutorLoss(self.num_executors, keeps_swap, self.crash_counts.of("schedule")))

    @property
    def suspects(self) -> list[int]:
        """The requests that the scheduler has listed."""
        return suspects_in(self.black_box)

    def successor(self, *, has_executor: bool = True) -> "Bench":
        """A scheduler that takes the place of this one, which has died, with the same executor, or with a new one."""
        bench = Bench(self.scheduler.config, self.depth, self.num_detokenize, self.executor.copy_s)
        while self.steps:
            self._compute()
        bench.front = self.front.successors(self.scheduler.config, keeps_kv=has_executor)
        begin = 0 if has_executor else bench.executor.num_blocks
        bench.executor.kv[begin:] = self.executor.kv[begin:]
        begin = 0 if has_executor else bench.executor.num_state_slots
        bench.executor.states[begin:] = self.executor.states[begin:]
        for ours, theirs in zip(bench.indices, self.indices, strict=True):
            ours[:] = theirs
        bench.num_executors = self.num_executors + (not has_executor)
        bench.scheduler = bench._scheduler(self.scheduler.config)
        return bench

    def hand_over(self) -> "Bench":
        """A scheduler that takes the place of this one on purpose."""
        while self.steps:
            self.answer()
            self.report()
        self.scheduler.publish_partial_blocks()
        self.check()
        return self.successor()

    def report(self, sent: bool = True) -> None:
        """Send to every replica of detokenize, or find each of their edges full."""
        for replica in range(self.num_detokenize):
            self.report_to(replica, sent)
        if sent:  # the stage's wake is over
            self.scheduler.lifecycle.list_suspects()
            self.crash_counts.cleared(self.scheduler.lifecycle.quarantine.take_cleared())
            self.scheduler.lifecycle.release_held()

    def report_to(self, replica: int, sent: bool) -> None:
        message = self.scheduler.output_buffer.pending(replica)
        if message is None or not sent:
            return
        self.scheduler.output_buffer.mark_sent(replica)
        ids = np.frombuffer(inline(message.ids), np.int32).tolist()
        seqs = np.frombuffer(inline(message.seqs), np.uint64).tolist()
        for first in message.firsts:
            assert seqs[first.index] not in self.begun, "a sequence has two first ids"
            self.begun.add(seqs[first.index])
        for counts in message.drafts:
            self.drafts[seqs[counts.index]] = counts.num_accepted, counts.num_rejected
        for seq, start, data in zip(message.prompt_seqs, message.prompt_starts, message.prompt_logprobs, strict=True):
            assert seq not in self.finished, "prompt records came after the closing"
            width = prompt_logprob_bytes(self.admitted[seq][1])
            assert start * width == len(self.prompts[seq]) and len(data) % width == 0
            self.prompts[seq] += data
        token_outputs, errors = inline(message.token_outputs), iter(message.errors)
        for seq, start, num, finish in zip(
            np.frombuffer(inline(message.seqs), np.uint64).tolist(),
            np.frombuffer(inline(message.starts), np.int32).tolist(),
            np.frombuffer(inline(message.counts), np.int32).tolist(),
            np.frombuffer(inline(message.finishes), np.uint8).tolist(),
            strict=True,
        ):
            assert seq % self.num_detokenize == replica, "a sequence belongs to one replica"
            assert seq not in self.finished, "an entry came after the closing"
            assert start == len(self.received[seq]), "ids were lost or repeated"
            self.received[seq] += ids[:num]
            ids = ids[num:]
            num_bytes = num * token_output_bytes(self.admitted[seq][1], hidden_size=0)
            self.token_outputs[seq] += token_outputs[:num_bytes]
            token_outputs = token_outputs[num_bytes:]
            if finish != Finish.NONE:
                self.finished[seq] = Finish(finish)
            if finish == Finish.ERROR:
                self.errors[seq] = next(errors)
        assert not ids and not token_outputs and next(errors, None) is None
        assert self.begun == {seq for seq in self.received if len(self.received[seq]) > self.given(seq)}

    def run(self) -> int:
        """Run until idle, in the stage's order: settle, plan, report. Returns the number of steps."""
        self._feed()
        for steps in range(MAX_STEPS):
            if not self.steps:
                self.report()
                return steps
            self.answer()
            self._feed()
            self.report()
        raise AssertionError("it never ends")

    def _feed(self) -> None:
        self.load_adapters()
        self.fill()
        if not self.steps:  # `fill` may have released sequences that were held back, whose adapter is not loaded
            self.load_adapters()
            self.fill()

    def check_outputs(self) -> None:
        """Every finished sequence has exactly its ids; an aborted one has a prefix of them."""
        for seq, finish in self.finished.items():
            message, options = self.admitted[seq]
            prompt = np.frombuffer(inline(message.prompt_ids), np.int32).tolist()
            assert options.max_tokens is not None
            limit = min(options.max_tokens, self.scheduler.config.max_model_len - len(prompt))
            index = self.opened[seq].index
            ids, natural = expected(prompt, options, index, limit)
            if any(fails := [token_id in options.bias_ids for token_id in ids]):
                ids, natural = ids[: fails.index(True)], Finish.ERROR
            if options.num_logprobs >= 0:
                assert self.token_outputs[seq] == b"".join(
                    record(one, options.num_logprobs) for one in self.received[seq]
                )
            prompt_logprobs = b""
            if options.num_prompt_logprobs >= 0 and index == 0:
                prompt_logprobs = b"".join(record(one, options.num_prompt_logprobs) for one in prompt[1:])
            assert self.prompts[seq] == prompt_logprobs or (
                not self.received[seq] and prompt_logprobs.startswith(self.prompts[seq])
            )
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


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return SchedulerConfig(**(values | changes))
