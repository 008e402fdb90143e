"""The simulation against the real scheduler, and what it promises by itself."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile
from tools.simulator.replica import FastReplica
from tools.simulator.requests import SimRequest, Trace
from tools.simulator.search import find_replicas
from tools.simulator.simulation import Outcome, Setup, Simulation
from tools.simulator.summary import Summary, describe, summarize, table
from tools.simulator.synthetic import KINDS, Shape, synthetic

PROFILE = ReplicaProfile()
SMALL = ReplicaProfile(
    base_s=0.008, row_s=0.0012, token_s=0.0008, kv_tokens=24_000, max_num_seqs=32, max_num_batched_tokens=96,
    long_prompt_tokens=1024, max_model_len=16_384,
)  # fmt: skip
"""As a small model on a CPU: long prompts in small chunks, and little memory."""


def run(trace: Trace, setup: Setup) -> tuple[Outcome, Summary]:
    outcome = Simulation(trace, setup).run()
    return outcome, summarize(trace, outcome)


def one_request(num_prompt: int = 100, num_output: int = 5, **fields: object) -> SimRequest:
    return msgspec.structs.replace(SimRequest(0, 0.0, num_prompt, (num_output,), ()), **fields)


@pytest.mark.parametrize(
    ("kind", "num_replicas", "rate", "profile"),
    [("shared", 2, 8.0, PROFILE), ("chat", 1, 1.5, PROFILE), ("poisson", 1, 0.5, SMALL), ("chat", 2, 0.5, SMALL)],
)
def test_it_agrees_with_the_real_scheduler(kind: str, num_replicas: int, rate: float, profile: ReplicaProfile) -> None:
    shape = Shape(num_requests=150, rate=rate, prompt_tokens=1000, output_tokens=60, num_groups=10)
    trace, setup = synthetic(kind, shape), Setup(num_replicas, profile)
    _, fast = run(trace, setup)
    _, real = run(trace, msgspec.structs.replace(setup, is_real=True))
    assert fast.hit_rate == pytest.approx(real.hit_rate, abs=0.02)
    assert fast.ttft_p50_s == pytest.approx(real.ttft_p50_s, rel=0.10)
    assert fast.tpot_p50_s == pytest.approx(real.tpot_p50_s, rel=0.10)
    assert kind == "poisson" or real.hit_rate > 0.3


@pytest.mark.parametrize("is_real", [False, True])
def test_one_request_takes_the_time_of_its_steps(is_real: bool) -> None:
    profile = ReplicaProfile(base_s=0.01, row_s=0.001, context_s=0.0, token_s=0.0001, pair_s=0.0)
    trace = Trace("one", 64, [one_request(100, 5)])
    outcome, _ = run(trace, Setup(1, profile, is_real=is_real, overhead_s=0.5))
    assert outcome.first_s[0] == pytest.approx(0.5 + 0.02)
    assert outcome.end_s[0] == pytest.approx(0.5 + 0.02 + 4 * 0.011)


@pytest.mark.parametrize("is_real", [False, True])
def test_a_repeated_prompt_comes_from_the_prefix_cache(is_real: bool) -> None:
    keys = tuple(range(1, 17))
    trace = Trace("two", 64, [one_request(1030, 5, keys=keys), one_request(1030, 5, keys=keys, index=1, arrival_s=9.0)])
    outcome, _ = run(trace, Setup(3, PROFILE, is_real=is_real))
    assert outcome.num_cached.tolist() == [0, 1024]
    assert outcome.replica_index[0] == outcome.replica_index[1]
    assert outcome.first_s[1] - 9 < outcome.first_s[0] / 3


@pytest.mark.parametrize("is_real", [False, True])
def test_a_later_turn_finds_the_answers_blocks(is_real: bool) -> None:
    first = one_request(64, 70, keys=(1,), output_keys=(2,))
    later = one_request(140, 5, keys=(1, 2), index=1, arrival_s=9.0)
    outcome, _ = run(Trace("turns", 64, [first, later]), Setup(1, PROFILE, is_real=is_real))
    assert outcome.num_cached.tolist() == [0, 128]


@pytest.mark.parametrize("is_real", [False, True])
def test_samples_share_their_prompt(is_real: bool) -> None:
    request = one_request(640, 5, keys=tuple(range(1, 11)), outputs=(5, 9, 2))
    outcome, summary = run(Trace("n", 64, [request]), Setup(1, PROFILE, is_real=is_real))
    assert outcome.end_s[0] > outcome.first_s[0]
    assert summary.output_tokens_per_s == pytest.approx(16 / outcome.end_s[0])


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 1000), st.integers(1, 3), st.sampled_from([3000, 8000, 40_000]))
def test_every_request_ends_once_and_memory_is_free_again(kind: str, seed: int, num: int, kv_tokens: int) -> None:
    """Also if so little memory is there that sequences are preempted all the time."""
    profile = msgspec.structs.replace(SMALL, kv_tokens=kv_tokens)
    shape = Shape(60, 20.0, 400, 80, num_groups=4, num_turns=3, seed=seed)
    trace = synthetic(kind, shape)
    trace.requests = [one for one in trace.requests if one.num_prompt + one.num_output <= kv_tokens]
    for index, one in enumerate(trace.requests):
        one.index = index
    simulation = Simulation(trace, Setup(num, profile))
    outcome = simulation.run()
    arrivals = np.array([one.arrival_s for one in trace.requests])
    assert (outcome.first_s > arrivals).all() and (outcome.end_s >= outcome.first_s).all()
    assert (outcome.num_cached >= 0).all()
    for replica in simulation._replicas:
        assert isinstance(replica, FastReplica)
        assert not replica.cache.refs and replica._private == 0 and not replica._decoding
        assert len(replica.cache.lru) * trace.block_tokens <= kv_tokens


def test_the_same_seed_gives_the_same_result() -> None:
    trace = synthetic("bursts", Shape(200, 50.0))
    first, again = (run(trace, Setup(4, PROFILE, "power-of-two", seed=3))[0] for _ in range(2))
    np.testing.assert_array_equal(first.first_s, again.first_s)
    np.testing.assert_array_equal(first.replica_index, again.replica_index)


def test_a_full_replica_refuses_as_its_gateway_does() -> None:
    profile = msgspec.structs.replace(PROFILE, max_open_sequences=3)
    trace = Trace("burst", 64, [one_request(index=index) for index in range(5)])
    outcome, summary = run(trace, Setup(1, profile))
    assert (outcome.replica_index < 0).tolist() == [False, False, False, True, True]
    assert summary.num_refused == 2 and summary.ttft_p99_s == float("inf")


def test_prefix_aware_routing_beats_the_others_on_shared_prefixes() -> None:
    """The bars: hits near consistent hashing's, and far shorter tails than its and than two random choices'."""
    trace = synthetic("shared", Shape(num_requests=2000, rate=100.0, num_groups=60))
    found = {
        policy: run(trace, Setup(20, PROFILE, policy))[1]
        for policy in ("predicted-ttft", "consistent-hash", "bounded-hash", "power-of-two")
    }
    ours = found["predicted-ttft"]
    assert ours.num_refused == 0
    assert ours.hit_rate >= found["bounded-hash"].hit_rate
    assert ours.ttft_p99_s <= 0.7 * found["consistent-hash"].ttft_p99_s
    assert ours.ttft_p99_s <= 0.7 * found["bounded-hash"].ttft_p99_s
    assert ours.ttft_p99_s <= 0.5 * found["power-of-two"].ttft_p99_s


@pytest.mark.parametrize(
    ("trace", "profile", "is_real", "words"),
    [
        (
            Trace("t", 64, [one_request(300_000)]),
            PROFILE,
            False,
            "request 1 of t has 300000 [+] 5 tokens, but max_model",
        ),
        (Trace("t", 64, [one_request(90_000)]), ReplicaProfile(kv_tokens=80_000), False, "but kv_tokens is 80000"),
        (Trace("t", 24, [one_request()]), PROFILE, False, "blocks of 24 tokens are no multiple"),
        (Trace("t", 2, [one_request()]), ReplicaProfile(block_size=2), True, "at least 4 tokens"),
        (Trace("t", 64, [one_request()]), ReplicaProfile(max_num_batched_tokens=16), False, "max_num_seqs: 128"),
    ],
)
def test_what_can_not_be_simulated_is_named(trace: Trace, profile: ReplicaProfile, is_real: bool, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Simulation(trace, Setup(1, profile, is_real=is_real))


def test_several_routers_each_see_a_part() -> None:
    trace = synthetic("shared", Shape(600, 60.0, num_groups=20))
    one, eight = (run(trace, Setup(12, PROFILE, num_routers=num))[1] for num in (1, 8))
    assert eight.hit_rate < one.hit_rate and eight.num_refused == 0


def test_cells_have_their_own_replicas() -> None:
    trace = synthetic("shared", Shape(600, 60.0, num_groups=20))
    outcome, summary = run(trace, Setup(12, PROFILE, num_cells=3, num_routers=2))
    assert summary.num_refused == 0 and len(set(outcome.replica_index.tolist())) == 12
    firsts = {one.keys[0] for one in trace.requests if one.keys}
    cells = [
        {outcome.replica_index[one.index] % 3 for one in trace.requests if one.keys[:1] == (key,)} for key in firsts
    ]
    assert sum(map(len, cells)) <= 2 * len(cells)  # those above their share spill
    with pytest.raises(UserError, match="--cells 4: needs at most as many as replicas, 3"):
        run(trace, Setup(3, PROFILE, num_cells=4))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_the_search_finds_the_least_number(needed: int, most: int) -> None:
    example = run(Trace("t", 64, [one_request()]), Setup(1, PROFILE))[1]

    def simulate(num: int) -> Summary:
        return msgspec.structs.replace(example, num_replicas=num, ttft_p99_s=2.0 if num < needed else 0.5)

    found, tried = find_replicas(simulate, 1.0, most)
    assert found == (needed if needed <= most else None)
    assert len(tried) <= 20 and max(one.num_replicas for one in tried) <= most


def test_a_table_fits_80_columns() -> None:
    summary = msgspec.structs.replace(
        run(Trace("t", 64, [one_request()]), Setup(1, PROFILE))[1],
        num_replicas=4096, num_refused=123_456, output_tokens_per_s=12_345_678.0, ttft_p99_s=float("inf"),
        ttft_p50_s=1234.5, tpot_p99_s=0.01234, policy="consistent-hash", hit_rate=1.0, busy=1.0,
    )  # fmt: skip
    assert max(map(len, table([summary]).splitlines())) <= 80
    for kind in KINDS:
        assert max(map(len, describe(synthetic(kind, Shape(50))).splitlines())) <= 80
