"""Each key of [schedule] changes the stage's behaviour, tested through its messages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings, SpeculativeSettings
from pipeline.runtime import messages as m
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.shm.arrays import ShmRef
from pipeline.stages.schedule.scheduler_config import SchedulerConfig, StateConfig
from tests.fakes import FakeExecutor
from tests.rig import Rig, raw

NO_SLOWDOWN_LIMITS: dict[str, Any] = {"prompt_max_slowdown": 0.0, "long_prompt_tokens": 0}
FACTS = m.ExecuteFacts(num_blocks=512, block_size=16, max_model_len=4096, vocab_size=997)


class ScheduleHarness:
    """A schedule stage and its fake executor. Every step takes one millisecond and one for each token."""

    def __init__(self, rig: Rig, facts: m.ExecuteFacts) -> None:
        self.rig = rig
        self._executor = FakeExecutor(
            facts.num_blocks,
            take=lambda array, dtype: np.frombuffer(rig.bytes_of(array), dtype).copy(),
            num_swap_blocks=facts.num_swap_blocks,
        )
        self.rows: dict[int, int] = {}
        """Request ids by row"""
        self.starts: dict[int, int] = {}
        """For each request that got a row, the first position that it computed"""
        self.order: list[int] = []
        """Requests in the order in which they got rows, including repeats"""
        self.num_copies = 0

    def admit(self, request_id: int, prompt: range, max_tokens: int = 1, priority: int = 0) -> None:
        ids = np.array(prompt, np.int32).tobytes()
        options = m.GenerationOptions(max_tokens=max_tokens, temperature=0.0, priority=priority)
        self.rig.send(m.Admit(request_id, 1, 0, float(request_id), ids, raw(options)), "ingest.0")

    def step(self) -> dict[int, int]:
        """Compute a step. Returns the number of tokens of each request in it."""
        step: m.Step = self.rig.receive("execute", m.Step)
        self.rig.send(self._executor.run(step), "execute.0")
        self.num_copies += len(self._array(step.copy_sources))
        self.rows |= {add.row: add.request_id for add in step.adds}
        self.order += [add.request_id for add in step.adds]
        requests = [self.rows[row] for row in self._array(step.rows)]
        for request_id, start in zip(requests, self._array(step.starts), strict=True):
            self.starts.setdefault(request_id, start)
        return dict(zip(requests, self._array(step.counts), strict=True))

    def _array(self, array: m.Array) -> list[int]:
        return [int(one) for one in np.frombuffer(self.rig.bytes_of(array), np.int32)]

    def until_idle(self) -> None:
        """Compute until nothing runs, waits or is swapped out."""
        while (load := self.rig.load()).num_running or load.num_waiting or load.num_swapped:
            self.step()

    def learn(self) -> None:
        """Compute prompts next to a decoding sequence, so that the cost of tokens is known. Returns while that
        sequence, request 1, still runs."""
        self.admit(1, range(1, 9), max_tokens=4000)
        self.step()
        for number in range(40):
            self.admit(100 + number, range(number, number + 20 + number % 7 * 10))
            for _ in range(3):
                self.step()
        while self.rig.load().num_running > 1:
            self.step()

    def largest_chunk(self, request_id: int, num_steps: int = 4) -> int:
        return max(self.step().get(request_id, 0) for _ in range(num_steps))


@contextmanager
def around(facts: m.ExecuteFacts = FACTS, swap_bytes: int = 0, **schedule: Any) -> Iterator[ScheduleHarness]:
    settings = Settings(schedule=ScheduleSettings(**schedule), execute=ExecuteSettings(swap_bytes=swap_bytes))
    with Rig("schedule", settings) as rig:
        rig.start(facts)
        yield ScheduleHarness(rig, facts)


def test_every_limit_comes_from_the_settings() -> None:
    settings = ScheduleSettings(
        max_num_seqs=7,
        max_num_batched_tokens=70,
        max_num_prefill_tokens=700,
        prefix_caching=False,
        policy="priority",
        preemption="swap",
        kv_offload=False,
        max_step_ms=125.0,
        long_prompt_tokens=300,
        prompt_max_slowdown=4.5,
        encode_max_slowdown=1.25,
        long_prompt_max_slowdown=3.5,
    )
    facts = m.ExecuteFacts(
        num_blocks=11,
        block_size=32,
        max_model_len=333,
        vocab_size=997,
        num_swap_blocks=5,
        hidden_size=48,
        kv_groups=[KVGroup(), KVGroup(9)],
        num_speculative_tokens=6,
        max_num_drafts=20,
        eos_ids=[2, 7],
        max_num_top=21,
        block_bytes=12_288,
        slot_bytes=4_096,
        num_encoder_rows=512,
        max_whole_run=80,
        generates=False,
    )
    found = msgspec.structs.asdict(
        SchedulerConfig.of(settings, facts, SpeculativeSettings(adaptive=False), 3, 2, 1_000_000)
    )
    assert found.pop("states") == StateConfig()
    assert not found.pop("is_encoder")  # it changes others: test_encoders.py
    assert found == {
        "generates": False,
        "max_loras": 3,
        "num_stages": 2,
        "waits_for_adapters": True,
        "num_blocks": 11,
        "max_model_len": 333,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 70,
        "max_num_prefill_tokens": 700,
        "block_size": 32,
        "prefix_caching": False,
        "num_swap_blocks": 5,
        "kv_offload": False,
        "policy": "priority",
        "preemption": "swap",
        "max_step_s": 0.125,
        "long_prompt_tokens": 300,
        "prompt_max_slowdown": 4.5,
        "encode_max_slowdown": 1.25,
        "long_prompt_max_slowdown": 3.5,
        "hidden_size": 48,
        "kv_groups": (KVGroup(), KVGroup(9)),
        "num_speculative_tokens": 6,
        "max_num_drafts": 20,
        "adaptive_speculation": False,
        "eos_ids": (2, 7),
        "max_num_top": 21,
        "block_bytes": 12_288,
        "slot_bytes": 4_096,
        "num_encoder_rows": 512,
        "max_whole_run": 80,
        "sleep_cache_bytes": 1_000_000,
    }
    defaults = msgspec.structs.asdict(SchedulerConfig.of(ScheduleSettings(), FACTS))
    assert [name for name, value in found.items() if value == defaults[name]] == [], "all of them differ"


def test_the_executor_s_number_of_prefill_tokens_counts() -> None:
    facts = msgspec.structs.replace(FACTS, max_num_prefill_tokens=384)
    for set_to in (0, 16, 384):
        assert SchedulerConfig.of(ScheduleSettings(max_num_prefill_tokens=set_to), facts).max_num_prefill_tokens == 384


def test_zero_means_unlimited() -> None:
    limits = SchedulerConfig.of(ScheduleSettings(max_step_ms=0.0, long_prompt_tokens=0), FACTS)
    assert limits.max_step_s == float("inf")
    assert limits.long_prompt_tokens >= FACTS.max_model_len


def test_max_num_seqs_limits_running_sequences() -> None:
    with around(max_num_seqs=2) as stage:
        for request_id in (1, 2, 3):
            stage.admit(request_id, range(request_id, request_id + 8), max_tokens=100)
        stage.rig.until(lambda load: load.num_running + load.num_waiting == 3)
        for _ in range(3):
            stage.step()
        load = stage.rig.load()
        assert (load.num_running, load.num_waiting) == (2, 1)


def test_max_num_batched_tokens_limits_a_step() -> None:
    with around(max_num_batched_tokens=48) as stage:
        stage.admit(1, range(100))
        assert [stage.step()[1] for _ in range(3)] == [48, 48, 4]


def test_max_num_prefill_tokens_limits_a_step_in_which_none_decodes() -> None:
    with around(max_num_batched_tokens=48, max_num_prefill_tokens=80) as stage:
        stage.admit(1, range(100), max_tokens=8)
        assert [stage.step()[1] for _ in range(2)] == [80, 20]
        stage.admit(2, range(200, 300))
        chunks = [stage.step() for _ in range(3)]
        assert [step for step in chunks if 2 in step][:2] == [{1: 1, 2: 47}, {1: 1, 2: 47}]


@pytest.mark.parametrize(("prefix_caching", "start"), [(True, 96), (False, 0)])
def test_prefix_caching_can_be_turned_off(prefix_caching: bool, start: int) -> None:
    with around(prefix_caching=prefix_caching) as stage:
        for request_id in (1, 2):
            stage.admit(request_id, range(100))
            stage.until_idle()
        assert stage.starts == {1: 0, 2: start}


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [1, 2, 3, 4]), ("priority", [1, 3, 4, 2]), ("longest-prefix-match", [1, 4, 2, 3])],
)
def test_policy_sets_the_order(policy: str, order: list[int]) -> None:
    """Request 3 has the better priority, and request 4 the cached prompt."""
    with around(policy=policy, max_num_seqs=1) as stage:
        stage.admit(1, range(64), max_tokens=4)
        stage.step()  # runs
        stage.admit(2, range(200, 264), priority=9)
        stage.admit(3, range(300, 364), priority=5)
        stage.admit(4, range(64), priority=7)
        stage.rig.until(lambda load: load.num_waiting == 3)
        stage.until_idle()
        assert stage.order == order


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_copies_blocks_or_recomputes_them(preemption: str) -> None:
    """Two sequences do not fit into the blocks together: one is preempted, and resumed later."""
    facts = msgspec.structs.replace(FACTS, num_blocks=10, max_model_len=128, num_swap_blocks=16)
    with around(facts, 2**20, preemption=preemption, prefix_caching=False) as stage:
        for request_id in (1, 2):
            stage.admit(request_id, range(request_id * 100, request_id * 100 + 60), max_tokens=60)
        stage.rig.until(lambda load: load.num_running + load.num_waiting == 2)
        stage.until_idle()
        assert len(stage.order) > 2, "one of them was resumed"
        assert (stage.num_copies > 0) == (preemption == "swap")


def test_preemption_auto_selects_the_faster_mode() -> None:
    """The executor's copy times decide; "recompute" never copies."""
    facts = msgspec.structs.replace(FACTS, num_blocks=10, max_model_len=128, num_swap_blocks=16)
    with around(facts, 2**20, preemption="auto", prefix_caching=False) as stage:
        for request_id in (1, 2):
            stage.admit(request_id, range(request_id * 100, request_id * 100 + 60), max_tokens=60)
        stage.rig.until(lambda load: load.num_running + load.num_waiting == 2)
        stage.until_idle()
        assert stage.num_copies > 0


@pytest.mark.parametrize("kv_offload", [True, False])
def test_kv_offload_copies_full_blocks_to_swap_space(kv_offload: bool) -> None:
    facts = msgspec.structs.replace(FACTS, num_blocks=10, max_model_len=128, num_swap_blocks=16)
    with around(facts, 2**20, kv_offload=kv_offload) as stage:
        stage.admit(1, range(60), max_tokens=20)
        stage.rig.until(lambda load: load.num_running + load.num_waiting == 1)
        stage.until_idle()
        assert stage.num_copies == (4 if kv_offload else 0)


@pytest.mark.parametrize(("max_step_ms", "num_tokens"), [(0.0, 255), (40.0, 38), (80.0, 78)])
def test_max_step_ms_limits_chunks_next_to_a_decoding_sequence(max_step_ms: float, num_tokens: int) -> None:
    """Without the prompt a step takes 2 ms, and each of its tokens one more; with 0 only the token limit applies."""
    with around(max_step_ms=max_step_ms, max_num_batched_tokens=256, **NO_SLOWDOWN_LIMITS) as stage:
        stage.learn()
        stage.admit(2, range(2000, 2600))
        assert stage.largest_chunk(2) == pytest.approx(num_tokens, rel=0.25)


@pytest.mark.parametrize(("long_prompt_tokens", "is_held_back"), [(0, False), (599, True), (600, False)])
def test_long_prompt_tokens_sets_which_prompts_are_long(long_prompt_tokens: int, is_held_back: bool) -> None:
    with around(prompt_max_slowdown=0.0, long_prompt_tokens=long_prompt_tokens, max_num_batched_tokens=256) as stage:
        stage.learn()
        stage.admit(2, range(2000, 2600))
        assert (stage.largest_chunk(2) < 100) == is_held_back


@pytest.mark.parametrize(
    "limited",
    [
        lambda limit: {"prompt_max_slowdown": limit, "long_prompt_tokens": 0},
        lambda limit: {"prompt_max_slowdown": 0.0, "long_prompt_tokens": 100, "long_prompt_max_slowdown": limit},
    ],
    ids=["prompt_max_slowdown", "long_prompt_max_slowdown"],
)
def test_prompts_slow_down_a_step_by_at_most_the_limit(limited: Callable[[float], dict[str, Any]]) -> None:
    """Without the prompt a step takes 2 ms: 60 times that is 118 more tokens, 20 times 38."""
    chunks = []
    for limit in (20.0, 60.0):
        with around(max_num_batched_tokens=256, **limited(limit)) as stage:
            stage.learn()
            stage.admit(2, range(2000, 2600))
            chunks.append(stage.largest_chunk(2))
    assert chunks == [pytest.approx(38, abs=12), pytest.approx(118, abs=30)]


@pytest.mark.parametrize(("arena_bytes", "goes_by_memory"), [(65536, False), (1024**2, True)])
def test_arena_bytes_limits_prompts_in_shared_memory(arena_bytes: int, goes_by_memory: bool) -> None:
    """The ids of 20,000 tokens take 80,000 bytes. If they do not fit, they are sent inside of the message."""
    facts = msgspec.structs.replace(FACTS, num_blocks=2048, max_model_len=30_000)
    with around(facts, arena_bytes=arena_bytes) as stage:
        stage.admit(1, range(20_000))
        (add,) = stage.rig.receive("execute", m.Step).adds
        assert isinstance(add.ids, ShmRef) == goes_by_memory


@pytest.mark.parametrize(("state_tokens", "interval"), [(5, 64), (1640, 2048), (2048, 2048), (2049, 4096)])
def test_snapshots_are_as_far_apart_as_the_keys_and_values_of_their_size(state_tokens: int, interval: int) -> None:
    facts = msgspec.structs.replace(FACTS, num_state_slots=8, num_swap_state_slots=4, state_tokens=state_tokens)
    assert SchedulerConfig.of(ScheduleSettings(), facts).states == StateConfig(8, 4, interval)
