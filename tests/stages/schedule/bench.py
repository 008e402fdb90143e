"""A scheduler with a fake executor, for tests."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.process.black_box import NUM_BYTES, SuspectList, suspects_in
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_index import HEADER_BYTES, IndexMemory
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.kv_cache.prefix import KEY_BYTES
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.stages.schedule.state import SchedulerContext
from pipeline.supervisor.crashes.crash_counts import CrashCounts
from tests.fakes import EMPTY, PIXELS_PER_KEY, FakeExecutor, contents_of, inline
from tests.rig import raw
from tests.stages.schedule.front_stages import FrontStages
from tests.stages.schedule.received import Received

MAX_STEPS = 20_000


class Bench(Received):
    """A scheduler and a fake executor, and everything that detokenize would have received."""

    def __init__(self, config: SchedulerConfig, depth: int, num_detokenize: int = 1, copy_s: float = 0.0001) -> None:
        super().__init__(num_detokenize, config.max_model_len + (not config.generates))
        width = KEY_BYTES + (len(config.kv_groups) > 1)
        self.indices = [bytearray(HEADER_BYTES + width * num) for num in (config.num_blocks, config.num_swap_blocks)]
        """Of the KV cache, of swap space, and of the states in both; they outlive the scheduler."""
        states = config.states
        self.indices += [bytearray(HEADER_BYTES + KEY_BYTES * num) for num in (states.num_slots, states.num_swap_slots)]
        self.crash_counts = CrashCounts()
        self.black_box = memoryview(bytearray(NUM_BYTES))
        self.num_executors = 1
        self.run_ends: dict[int, dict[int, int]] = {}
        """`FakeExecutor.run_ends`, if the positions of a run see each other."""
        self.media: dict[int, dict[int, int]] = {}
        """`FakeExecutor.media`"""
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
        self.refused: list[m.Reject] = []
        self.in_rows: dict[int, int] = {}
        """Row → sequence, in the executor's state."""
        self.last_use: m.UseAdapters | None = None
        """The last message to the executor about LoRA adapters."""
        self._ids = count(1)

    def _executor(self, copy_s: float) -> FakeExecutor:
        config = self.scheduler.config
        executor = FakeExecutor(
            config.num_blocks,
            num_swap_blocks=config.num_swap_blocks,
            copy_s=copy_s,
            groups=config.kv_groups,
            num_state_slots=config.states.num_slots,
            num_swap_state_slots=config.states.num_swap_slots,
            num_encoder_rows=config.num_encoder_rows,
        )
        executor.media, executor.run_ends = self.media, self.run_ends
        return executor

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
        scope_id: str = "",
        media: Sequence[m.MediaItem] = (),
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
        more = request_id, arrival_s, num_crashes, outputs, attempt, cut_positions, scope_id, media
        return self.admit_options(prompt, options, *more)

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
        scope_id: str = "",
        media: Sequence[m.MediaItem] = (),
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
            scope_id=scope_id,
            media=list(media),
        )
        self.media[message.request_id] = contents_of(message.media)
        if self.scheduler.config.max_whole_run:
            runs = [run for item in message.media for run in item.runs]
            self.run_ends[message.request_id] = {at + i: at + num for at, num in runs for i in range(num)}
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
        self._check_keys()

    def _check_keys(self) -> None:
        """Whichever part of the scheduler has computed them, keys cover the ids of their sequence, and its images."""
        rows, block_size = self.scheduler.rows, self.scheduler.config.block_size
        for request in self.scheduler.requests.values():
            extras = prefix.media_extras(request.media.items, block_size) if request.media is not None else {}
            for sequence in request.open_sequences.values():
                ids = sequence.ids if sequence.row < 0 else rows.ids[sequence.row]
                keys: list[bytes] = []
                prefix.extend(keys, ids, len(sequence.keys), block_size, request.root, extras)
                assert sequence.keys == keys, "the key of a block is not that of its content"

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

    def sleep(self, meanwhile: Callable[[], object] = lambda: None, *, is_saved: bool = True) -> None:
        """The server sleeps and wakes. Its executor's successor has what was saved, and nothing else, and no rows; or
        it has died before that. Calls `meanwhile` while there is none."""
        while self.steps:
            self.tables.popleft()
            self.scheduler.settle(self._compute())
            self.report()
        blocks, slots = self.scheduler.choose_saved()
        if not is_saved:
            self.lose_executor(0, has_crashed=False)
            meanwhile()
            return
        before = self.executor
        self.executor = self._executor(before.copy_s)
        self.front = self.front.successors(self.scheduler.config, keeps_kv=True)
        for one, theirs in ((self.executor, before), *((stage, stage) for stage in self.front.stages)):
            kept = [*blocks, *range(one.num_blocks, len(one.kv))]  # swap space outlives it
            saved = theirs.kv[kept].copy()
            one.kv[:] = EMPTY
            one.kv[kept] = saved
            states = dict(enumerate(theirs.states))
            kept = [*slots, *range(one.num_state_slots, len(one.states))]
            one.states = [states[slot] if slot in kept else None for slot in range(len(one.states))]
        self.in_rows.clear()
        self.num_executors += 1
        self.last_use = None
        meanwhile()
        self.scheduler.executor_slept(self.num_executors)

    @property
    def suspects(self) -> list[int]:
        """The requests that the scheduler has listed."""
        return suspects_in(self.black_box)

    def successor(self, *, has_executor: bool = True) -> "Bench":
        """A scheduler that takes the place of this one, which has died, with the same executor, or with a new one."""
        bench = Bench(self.scheduler.config, self.depth, self.num_detokenize, self.executor.copy_s)
        bench.executor.encoder_cache = self.executor.encoder_cache
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
        self.receive(message, replica)

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


def media_item(name: str, *runs: tuple[int, int]) -> m.MediaItem:
    """An item whose key is of a name, as the fake executor expects it."""
    key = name.encode().ljust(KEY_BYTES, b"-")
    return m.MediaItem(key, list(runs), [sum(length for _, length in runs)], key * PIXELS_PER_KEY)
