"""The router: its expected caches against a plain model, its load over random histories, and its choices."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.routing.key_caches import KeyCaches
from pipeline.routing.policies import POLICIES, ConsistentHash, PredictedTTFT, Prompt
from pipeline.routing.router import Lease, ReplicaSpec, Router
from tests.slices import part_of

SPEC = ReplicaSpec(kv_tokens=6400, tokens_per_s=1000.0, open_s=0.001)
KEY_TOKENS = 64
CHAINS = [[10 * group + index for index in range(6)] for group in range(8)]


def router(policy: str = "predicted-ttft", num_replicas: int = 4, **options: bool) -> Router:
    found = Router(POLICIES[policy](0), KEY_TOKENS, **options)
    for number in range(num_replicas):
        found.add(f"replica {number}", SPEC)
    return found


def prompt(group: int = 0, num_keys: int = 6, num_tokens: int = 400) -> Prompt:
    return Prompt(num_tokens, CHAINS[group][:num_keys])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(0, 6)), max_size=60), st.integers(1, 12))
def test_caches_are_lrus_that_keep_prefixes_longest(uses: list[tuple[int, int, int]], capacity: int) -> None:
    caches, plain = KeyCaches(), [OrderedDict[int, None]() for _ in range(3)]
    for replica in range(3):
        caches.add(replica, capacity)
    for replica, group, num in uses:
        keys = CHAINS[group][:num]
        caches.use(replica, keys)
        for key in reversed(keys[:capacity]):
            plain[replica].pop(key, None)
            plain[replica][key] = None
        while len(plain[replica]) > capacity:
            plain[replica].popitem(last=False)
        caches.check()
        for chain in CHAINS:
            expected = {}
            for other, cache in enumerate(plain):
                lengths = [n for n in range(7) if all(key in cache for key in chain[:n])]
                if lengths[-1]:
                    expected[other] = lengths[-1]
            assert dict(caches.matches(chain)) == expected
    caches.remove(1)
    caches.check()
    assert all(replica != 1 for chain in CHAINS for replica, _ in caches.matches(chain))


@settings(deadline=None, max_examples=part_of(60, 20))
@given(st.sampled_from(sorted(POLICIES)), st.randoms(use_true_random=False), st.booleans())
def test_any_history_keeps_the_load_right(policy: str, rng: random.Random, learns: bool) -> None:
    one = router(policy, learns=learns)
    open_leases: list[Lease] = []
    names = {f"replica {number}" for number in range(4)}
    drained: set[str] = set()
    now_s = 0.0
    for _ in range(80):
        now_s += rng.random()
        match rng.randrange(7):
            case 0 | 1 | 2 if names - drained:
                lease = one.route(prompt(rng.randrange(8), rng.randrange(7), rng.randint(1, 500)), now_s)
                assert lease.replica in names - drained
                assert 0 <= lease.num_cached < lease.num_cached + lease.num_uncached
                open_leases.append(lease)
            case 3 if open_leases:
                one.first_token(rng.choice(open_leases), now_s)
            case 4 if open_leases:
                lease = open_leases.pop(rng.randrange(len(open_leases)))
                one.end(lease)
                one.end(lease)
                one.first_token(lease, now_s)
            case 5 if len(names) > 1:
                name = rng.choice(sorted(names))
                if rng.random() < 0.5:
                    one.remove(name)
                    names.discard(name)
                    drained.discard(name)
                else:
                    one.drain(name)
                    drained.add(name)
            case 6:
                name = f"replica {rng.randrange(100, 999)}"
                if name not in names:
                    one.add(name, SPEC)
                    names.add(name)
        one.check()
        assert one.loads.num_open.sum() == len(open_leases)
        waiting = sum(lease.num_uncached for lease in open_leases if not lease.has_first_token)
        assert one.loads.queued.sum() == pytest.approx(waiting)
    for lease in open_leases:
        one.end(lease)
    assert not one.loads.num_open.any() and not one.loads.queued.any()


def test_a_prompt_goes_where_its_prefix_is() -> None:
    one = router()
    first = one.route(prompt(), 0.0)
    one.first_token(first, 0.4)
    one.end(first)
    again = one.route(prompt(), 1.0)
    assert again.replica == first.replica
    assert (again.num_cached, again.num_uncached) == (384, 16)
    assert again.predicted_s == pytest.approx(0.016)


def test_a_busy_replica_does_not_keep_its_prefix() -> None:
    """It has the prefix, but more tokens in its queue than the prefix has."""
    one = router()
    names = [one.route(prompt(), 0.0).replica for _ in range(200)]
    counts = [names.count(name) for name in set(names)]
    assert len(counts) == 4 and max(counts) < 2 * min(counts)


def test_a_larger_weight_keeps_prompts_at_their_prefix_for_longer() -> None:
    def num_replicas(weight: float) -> int:
        one = Router(PredictedTTFT(0, weight), KEY_TOKENS)
        for number in range(16):
            one.add(f"replica {number}", SPEC)
        return len({one.route(prompt(), 0.0).replica for _ in range(60)})

    assert num_replicas(4.0) < num_replicas(1.0)


def test_prompts_without_a_known_prefix_are_spread() -> None:
    one = router()
    names = [one.route(Prompt(100, [1000 + number]), 0.0).replica for number in range(40)]
    assert {names.count(name) for name in set(names)} == {10}


def test_an_idle_router_has_no_favourite() -> None:
    one = router()
    names = []
    for number in range(100):
        lease = one.route(Prompt(100, [1000 + number]), 0.0)
        names.append(lease.replica)
        one.end(lease)
    assert len(set(names)) == 4


def test_a_short_common_prefix_does_not_attract_every_request() -> None:
    one = router()
    names = [one.route(Prompt(1000, [1, 1000 + number]), 0.0).replica for number in range(40)]
    counts = [names.count(name) for name in set(names)]
    assert len(counts) == 4 and max(counts) <= 12


def test_memory_is_bounded_by_the_replicas_kv_caches() -> None:
    one = router()
    for number in range(3000):
        one.end(one.route(Prompt(700, [10 * number + index for index in range(10)]), 0.0))
    assert sum(one.caches.num_keys(index) for index in range(4)) == 4 * 6400 // KEY_TOKENS


def test_the_speed_of_each_replica_is_learnt() -> None:
    one = router(num_replicas=2, learns=True)
    speeds = {"replica 0": 4000.0, "replica 1": 500.0}
    for number in range(300):
        lease = one.route(Prompt(400, [1000 + number]), float(number))
        one.first_token(lease, number + 400 / speeds[lease.replica])
        one.end(lease)
    assert one.loads.tokens_per_s[0] == pytest.approx(4000, rel=0.1)
    lease = one.route(Prompt(400, [1]), 0.0)
    assert lease.replica == "replica 0" and lease.predicted_s == pytest.approx(0.1, rel=0.1)


def test_without_replicas_there_is_an_error() -> None:
    one = router(num_replicas=1)
    one.drain("replica 0")
    with pytest.raises(LookupError, match="no replica"):
        one.route(prompt(), 0.0)
    with pytest.raises(ValueError, match="there already"):
        one.add("replica 0", SPEC)


def test_consistent_hashing_moves_few_sessions_when_a_replica_leaves() -> None:
    one = router("consistent-hash", 8)

    def names() -> list[str]:
        return [one.route(Prompt(10, session=session), 0.0).replica for session in range(1000)]

    before = names()
    assert names() == before
    one.remove("replica 3")
    after = names()
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "replica 3")
    assert max(after.count(name) for name in set(after)) < 2.5 * 1000 / 7


def test_bounded_consistent_hashing_skips_full_replicas() -> None:
    one = Router(ConsistentHash(0, 1.25), KEY_TOKENS)
    for number in range(4):
        one.add(f"replica {number}", SPEC)
    names = [one.route(Prompt(10, session=1), 0.0).replica for _ in range(100)]
    assert max(names.count(name) for name in set(names)) <= 32


def test_two_random_choices_balance_open_requests() -> None:
    one = router("power-of-two", 16)
    for _ in range(1600):
        one.route(Prompt(10), 0.0)
    assert one.loads.num_open.max() - one.loads.num_open.min() <= 8


def test_replicas_that_have_just_refused_a_request_are_left_out_of_one_choice() -> None:
    one = router(num_replicas=3)
    for _ in range(6):
        with one.without({"replica 0", "replica 2", "unknown"}):
            assert one.route(prompt(), 0.0).replica == "replica 1"
    assert one.route(prompt(group=1), 0.0).replica != "replica 1", "it is busy, and the others are back"
    one.check()


def test_the_speed_of_equal_replicas_scales_predictions() -> None:
    one = router(num_replicas=2)
    before = one.route(prompt(), 0.0)
    one.end(before)
    one.set_speed(2 * SPEC.tokens_per_s, 0.73)
    assert one.route(prompt(group=1), 0.0).predicted_s == pytest.approx(before.predicted_s / 2)
