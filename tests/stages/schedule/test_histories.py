"""Exact tokens and no lost block, for any interleaving of events."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.config.settings import PolicyName
from pipeline.runtime import messages as m
from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.stages.schedule.policies.policy import POLICIES
from pipeline.stages.schedule.scheduler_config import PreemptionMode, SchedulerConfig, StateConfig
from tests.fakes import SLOW_GRAMMAR
from tests.stages.schedule.bench import Bench, config, inline

PROMPTS = st.one_of(
    st.integers(1, 90).map(lambda length: list(range(length))),  # all share a prefix
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
)

EXAMPLES = int(os.environ.get("PIPELINE_HISTORIES", "20"))  # random histories of each kind; 100 take about 20 s

WINDOWS = st.one_of(st.integers(1, 70), st.sampled_from([1, 2, 15, 16, 17, 18, 32, 33])).map(KVGroup)


class Histories(RuleBasedStateMachine):
    """Any history of admissions, aborts, steps and refused reports, at any depth and with any limits."""

    GROUPS: st.SearchStrategy[tuple[KVGroup, ...]] = st.just((FULL,))
    STATES: st.SearchStrategy[StateConfig] = st.just(StateConfig())
    NUM_ENCODER_ROWS, MAX_WHOLE_RUN = st.just(0), 0
    MAX_SLOWDOWNS: st.SearchStrategy[float] = st.just(float("inf"))
    IS_ENCODER = False

    @initialize(
        data=st.data(),
        depth=st.integers(1, 4),
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([16, 24, 64, 200]),
        prefix_caching=st.booleans(),
        num_detokenize=st.integers(1, 3),
        num_swap_blocks=st.sampled_from([0, 3, 30]),
        kv_offload=st.booleans(),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        policy=st.sampled_from(list(POLICIES)),
        copy_s=st.sampled_from([0.0001, 0.02]),
        long_prompt_tokens=st.sampled_from([20, 1000]),
        plans_early=st.booleans(),
        bounds_s=st.sampled_from([(float("inf"), float("inf")), (0.02, 2.0), (float("inf"), 1.2), (0.003, 1.2)]),
        num_speculative_tokens=st.sampled_from([0, 1, 4, 15]),
        max_num_drafts=st.sampled_from([2, 30]),
        adaptive_speculation=st.booleans(),
        max_loras=st.integers(1, 3),
        num_stages=st.sampled_from([1, 1, 2, 3, 4]),
        waits_for_adapters=st.booleans(),
    )
    def start(
        self,
        data: st.DataObject,
        depth: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        prefix_caching: bool,
        num_detokenize: int,
        num_swap_blocks: int,
        kv_offload: bool,
        preemption: PreemptionMode,
        policy: PolicyName,
        copy_s: float,
        long_prompt_tokens: int,
        plans_early: bool,
        bounds_s: tuple[float, float],
        num_speculative_tokens: int,
        max_num_drafts: int,
        adaptive_speculation: bool,
        max_loras: int,
        num_stages: int,
        waits_for_adapters: bool,
    ) -> None:
        if num_stages > 1:
            num_speculative_tokens = 0  # not with a pipeline
        groups, states = data.draw(self.GROUPS), data.draw(self.STATES)
        if states.num_slots:
            num_speculative_tokens = 0
        if self.IS_ENCODER:
            num_speculative_tokens, num_stages = 0, 1
        self.bench = Bench(
            self.of_kind(
                budget,
                num_blocks=num_blocks * len(groups),
                max_model_len=128,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                prefix_caching=prefix_caching,
                num_swap_blocks=num_swap_blocks * len(groups),
                kv_offload=kv_offload,
                preemption=preemption,
                policy=policy,
                max_step_s=bounds_s[0],
                long_prompt_tokens=long_prompt_tokens,
                long_prompt_max_slowdown=bounds_s[1],
                kv_groups=groups,
                num_speculative_tokens=num_speculative_tokens,
                max_num_drafts=max_num_drafts,
                adaptive_speculation=adaptive_speculation,
                max_loras=max_loras,
                num_stages=num_stages,
                waits_for_adapters=waits_for_adapters,
                states=states,
                num_encoder_rows=data.draw(self.NUM_ENCODER_ROWS),
                max_whole_run=self.MAX_WHOLE_RUN,
                encode_max_slowdown=data.draw(self.MAX_SLOWDOWNS),
                block_bytes=1,
                slot_bytes=1,
                sleep_cache_bytes=num_blocks // 3,
            ),
            depth,
            num_detokenize,
            copy_s,
        )
        self.bench.plans_early = plans_early
        self.known: list[int] = []
        self.num_deaths = 0

    def of_kind(self, budget: int, **values: Any) -> SchedulerConfig:
        one = SchedulerConfig(**values, generates=not self.IS_ENCODER)
        return one.of_encoder(budget) if self.IS_ENCODER else one

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
        num_crashes=st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
        adapter_id=st.sampled_from(["", "", "a", "b", "c", "d"]),
        grammar=st.sampled_from(["", "", "", "", "quick", SLOW_GRAMMAR]),
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
        num_crashes: int,
        adapter_id: str,
        grammar: str,
    ) -> None:
        if self.IS_ENCODER:
            grammar = ""
            max_tokens, n, tops = 1, 1, (tops[0], -1)
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
            num_crashes=num_crashes,
            adapter_id=adapter_id,
            compiled_grammar=grammar,
        )
        self.known.append(number)

    @rule(seconds=st.sampled_from([0.01, 3.0]))
    def pass_time(self, seconds: float) -> None:
        """Turns of slow masks come."""
        self.bench.scheduler.now_s += seconds

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

    @rule(num=st.sampled_from([0, 1, 2, None]))
    def load_adapters(self, num: int | None) -> None:
        self.bench.load_adapters(num)

    @rule()
    def fill(self) -> None:
        self.bench.fill()

    @precondition(lambda self: self.bench.steps)
    @rule()
    def answer(self) -> None:
        self.bench.answer()

    @precondition(lambda self: self.num_deaths < 2)  # a third one may end requests (quarantine.py)
    @rule(num_run=st.integers(0, 4), keeps_swap=st.sampled_from([True, True, False]))
    def lose_executor(self, num_run: int, keeps_swap: bool) -> None:
        self.num_deaths += 1
        self.bench.lose_executor(num_run, keeps_swap=keeps_swap)

    @rule(data=st.data(), num_aborted=st.integers(0, 2), is_saved=st.sampled_from([True, True, True, False]))
    def sleep(self, data: st.DataObject, num_aborted: int, is_saved: bool) -> None:
        aborted = [data.draw(st.sampled_from(self.known)) for _ in range(num_aborted if self.known else 0)]
        self.bench.sleep(lambda: [self.bench.abort(number) for number in aborted], is_saved=is_saved)

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


class GroupHistories(Histories):
    """The same, with groups of layers that keep a window of positions."""

    GROUPS = st.one_of(
        st.tuples(WINDOWS),
        st.tuples(st.just(FULL), WINDOWS),
        WINDOWS.map(lambda group: (FULL, group, group)),
        st.tuples(st.just(FULL), WINDOWS, WINDOWS),
        st.tuples(WINDOWS, WINDOWS),
        st.just((FULL, FULL)),
    )


class StateHistories(GroupHistories):
    """The same, of models with recurrent layers."""

    GROUPS = st.one_of(st.just((FULL,)), st.just((FULL,)), GroupHistories.GROUPS)
    STATES = st.builds(
        StateConfig,
        num_slots=st.one_of(st.integers(2, 6), st.integers(2, 20)),
        num_swap_slots=st.sampled_from([0, 1, 3, 8]),
        interval=st.sampled_from([16, 32, 64]),
        decode_interval=st.sampled_from([16, 32]),
        min_interval=st.sampled_from([16, 16, 32, 64]),
    )


class EncoderHistories(Histories):
    """The same, of encoders: each text is computed whole, once for each executor that did not die."""

    IS_ENCODER = True

    @invariant()
    def texts_are_whole(self) -> None:
        if not hasattr(self, "bench"):
            return
        rows = self.bench.scheduler.rows
        for step in self.bench.steps:
            parts = step.starts, step.counts, step.rows
            starts, counts, computed = (np.frombuffer(inline(one), np.int32).tolist() for one in parts)
            assert not any(starts) and len(step.adds) == len(counts)
            assert dict(zip(computed, counts, strict=True)) == {a.row: len(inline(a.ids)) // 4 for a in step.adds}
            assert not step.copy_sources and not step.block_rows
        assert (rows.num_computed_tokens[rows.order] == rows.num_tokens[rows.order]).all(), "a row waits for its step"
        load = self.bench.scheduler.load()
        assert load.num_blocks_cached == 0
        assert self.num_deaths or not load.num_preemptions


TestHistories = Histories.TestCase
TestEncoderHistories = EncoderHistories.TestCase
TestGroupHistories = GroupHistories.TestCase
TestStateHistories = StateHistories.TestCase

for of_kind in (TestHistories, TestEncoderHistories, TestGroupHistories, TestStateHistories):
    of_kind.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=30, deadline=None)
@given(
    depth=st.integers(1, 3),
    num_blocks=st.integers(12, 64),
    load=st.lists(st.tuples(PROMPTS, st.integers(1, 40)), min_size=1, max_size=8),
)
def test_a_step_that_is_planned_before_settling_is_the_step_that_would_come_after(
    depth: int, num_blocks: int, load: list[tuple[list[int], int]]
) -> None:
    early, late = benches = [Bench(config(num_blocks=num_blocks, max_model_len=128), depth) for _ in range(2)]
    early.plans_early = True
    for bench in benches:
        for prompt, max_tokens in load:
            bench.admit(prompt, max_tokens)
        bench.fill()
    while early.steps:
        for bench in benches:
            bench.answer()
            bench.fill()
            bench.report()
        # A sequence that has all its ids may release its row and blocks a step later, so block ids may differ.
        computed = [[(s.rows, s.starts, s.counts, s.samples, s.block_rows) for s in bench.steps] for bench in benches]
        assert computed[0] == computed[1]
        loads = [bench.scheduler.load() for bench in benches]
        assert loads[0].num_output_tokens == loads[1].num_output_tokens
    assert early.received == late.received
    assert late.num_early_plans == 0


def test_most_steps_of_decoding_rows_are_planned_before_settling() -> None:
    bench = Bench(config(), depth=1)
    bench.plans_early = True
    for index in range(4):
        bench.admit(range(index, index + 20), max_tokens=30)
    assert bench.run() < 40
    assert bench.num_early_plans > 25
    bench.check_outputs()


def test_steps_of_the_same_decoding_rows_repeat_the_plan_before() -> None:
    bench = Bench(config(num_blocks=64), depth=1)
    bench.plans_early = True
    for index in range(5):  # they need blocks in different steps
        bench.admit(range(index, 20 + 2 * index), max_tokens=60)
    runs, num_blocks = [], 0
    while not bench.scheduler.lifecycle.is_idle or bench.steps:
        if bench.steps:
            bench.answer()
        bench.fill()
        bench.report()
        runs += [step.run for step in bench.scheduler.in_flight]
        num_blocks += sum(len(inline(step.block_rows)) // 4 for step in bench.steps if runs[-1] is not None)
    assert sum(run is not None for run in runs) > 55  # all but those with prompts and the last ids
    assert num_blocks > 15
    bench.check_outputs()
