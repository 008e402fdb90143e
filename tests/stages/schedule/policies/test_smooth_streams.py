"""Running streams stay smooth beside prompts that arrive: the real scheduler with default settings, in virtual time."""

import random

import msgspec
import pytest

from pipeline.cli.bench.measure import Distribution
from pipeline.config.settings import Settings
from pipeline.replay.traffic import ReplicaProfile
from tools.simulator.requests import SimRequest
from tools.simulator.scheduled_replica import ScheduledReplica

COSTS = {
    "135M": {"base_s": 3.0e-3, "row_s": 5.5e-4, "context_s": 1.1e-6, "token_s": 3.6e-4, "pair_s": 6e-8},
    "135M, bf16": {"base_s": 10.5e-3, "row_s": 2.5e-4, "context_s": 1.1e-6, "token_s": 2.4e-4, "pair_s": 6e-8},
    "1.5B": {"base_s": 34e-3, "row_s": 3.2e-3, "context_s": 1.5e-6, "token_s": 3.6e-3, "pair_s": 1e-7},
}
"""Of models, with 4-bit weights unless named otherwise, on two cores (docs/performance.md)."""
STREAM_TOKENS = 900


def profile_of(model: str) -> ReplicaProfile:
    schedule = Settings().schedule
    profile = ReplicaProfile(
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        long_prompt_tokens=schedule.long_prompt_tokens,
        prompt_max_slowdown=schedule.prompt_max_slowdown,
        long_prompt_max_slowdown=schedule.long_prompt_max_slowdown,
    )
    return msgspec.structs.replace(profile, **COSTS[model])


class Streams:
    """`num_streams` streams, and then prompts that arrive at their times. Measures each step beside the streams."""

    def __init__(self, model: str, num_streams: int, prompts: list[tuple[float, int]]) -> None:
        self.ttft_s: list[float] = []
        self.ttft_steps: list[int] = []
        self._steps: list[float] = []
        self._num_before: dict[int, int] = {}
        """Steps before each prompt arrived."""
        self.num_streams, self.num_started, self.num_ended = num_streams, 0, 0
        self._replica = ScheduledReplica(profile_of(model), 16, self)
        for index in range(num_streams):
            self._submit(index, 0.0, 64, STREAM_TOKENS)
        for _ in range(100):  # all streams run, and the cost model knows what decoding and prompts cost
            self._replica.advance()
        for index in range(10):
            self._submit(num_streams + index, self._replica.next_s, 100, 1)
            while self.num_started < num_streams + index + 1:
                self._replica.advance()
        self.ttft_s.clear()
        self.ttft_steps.clear()
        begun_s = self._replica.next_s
        self.step_s = self._run([(begun_s + time_s, num_tokens) for time_s, num_tokens in prompts])

    def _run(self, prompts: list[tuple[float, int]]) -> Distribution:
        """The times of all steps until a stream ends: the gaps between a stream's tokens."""
        steps = self._steps
        index, now_s = 1000, prompts[0][0]
        while not self.num_ended:
            while prompts and prompts[0][0] <= self._replica.next_s:
                time_s, num_tokens = prompts.pop(0)
                self._submit(index, max(now_s, time_s), num_tokens, 1)
                index += 1
            steps.append(self._replica.next_s - now_s)
            now_s = self._replica.next_s
            self._replica.advance()
        return Distribution.of(steps)

    def _submit(self, index: int, now_s: float, num_prompt: int, num_output: int) -> None:
        self._num_before[index] = len(self._steps)
        self._replica.submit(SimRequest(index, now_s, num_prompt, (num_output,), ()), now_s)

    def started(self, request: SimRequest, num_cached: int) -> None: ...

    def first_token(self, request: SimRequest, now_s: float) -> None:
        self.num_started += 1
        self.ttft_s.append(now_s - request.arrival_s)
        self.ttft_steps.append(len(self._steps) - self._num_before[request.index])

    def ended(self, request: SimRequest, now_s: float) -> None:
        self.num_ended += request.outputs[0] == STREAM_TOKENS


def arriving(rate: float, lengths: tuple[int, ...], seed: int = 7) -> list[tuple[float, int]]:
    """A Poisson process of prompts of these lengths, which share the rate."""
    drawn, time_s, found = random.Random(seed), 0.0, []
    while len(found) < 400:
        time_s += drawn.expovariate(rate)
        found.append((time_s, drawn.choice(lengths)))
    return found


@pytest.mark.parametrize("num_streams", [8, 32])
@pytest.mark.parametrize(
    ("model", "prompts"),
    [
        ("135M", arriving(3.0, (128,))),
        ("135M", arriving(0.2, (2000,))),
        ("135M", arriving(0.7, (128, 128, 128, 2000))),
        ("135M", [(1.0 + number // 30, 128) for number in range(60)]),
        ("1.5B", arriving(0.4, (128,))),
        ("1.5B", arriving(0.02, (2000,))),
    ],
    ids=["128", "2000", "both", "bursts", "1.5B-128", "1.5B-2000"],
)
def test_a_stream_s_gaps_are_at_most_three_times_their_median(
    model: str, prompts: list[tuple[float, int]], num_streams: int
) -> None:
    streams = Streams(model, num_streams, list(prompts))
    assert streams.ttft_s, "prompts arrived"
    assert streams.step_s.max <= 3.0 * streams.step_s.p50
    assert streams.step_s.p99 <= 2.8 * streams.step_s.p50


def test_prompts_of_128_tokens_take_one_step_beside_32_streams() -> None:
    """The time that streams leave them is enough, so the tokens of a step must be."""
    streams = Streams("135M, bf16", 32, [(1.0 + 0.5 * number, 128) for number in range(30)])
    assert max(streams.ttft_steps) <= 2, "a step that is under way when it arrives, and its own"


def test_long_prompts_get_half_of_the_time_beside_streams() -> None:
    long = Streams("135M", 32, [(1.0, 2000)])
    alone_s = 2000 * COSTS["135M"]["token_s"] + 2000 * 1000 * COSTS["135M"]["pair_s"]
    assert long.ttft_s[0] < 2.6 * alone_s
