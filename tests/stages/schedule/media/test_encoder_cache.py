"""The rows of the encoder cache: shared by key, kept while they are held, evicted in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.messages import NUM_PARTS
from pipeline.stages.schedule.media.encode_costs import EncodeCosts
from pipeline.stages.schedule.media.encoder_cache import EncoderCache


def test_the_item_that_was_released_first_is_evicted_first() -> None:
    cache = EncoderCache(10)
    for key in (b"a", b"b", b"c"):
        cache.add(key, 3)
    for key in (b"b", b"a"):
        cache.release(key)
    assert (cache.num_held, cache.num_available()) == (3, 7)
    cache.add(b"d", 4)
    assert b"b" not in cache and b"a" in cache
    cache.check([b"c", b"d"])


def test_an_item_that_is_held_again_stays() -> None:
    cache = EncoderCache(4)
    slots = cache.add(b"a", 4)
    cache.release(b"a")
    assert np.array_equal(cache.hold(b"a"), slots)
    assert cache.num_available() == 0
    with pytest.raises(AssertionError, match="are needed"):
        cache.add(b"b", 1)


def test_rows_count_as_encoded_when_an_item_is_added_and_not_when_it_is_held_again() -> None:
    cache = EncoderCache(10)
    cache.add(b"a", 3)
    cache.hold(b"a")
    cache.add(b"b", 4)
    assert cache.num_rows_encoded == 7


def test_a_pinned_item_stays_though_no_one_holds_it() -> None:
    cache = EncoderCache(6)
    for key in (b"a", b"b"):
        cache.add(key, 3)
        cache.release(key)
    assert cache.num_available({b"a"}) == 3
    cache.add(b"c", 3, {b"a"})
    assert b"a" in cache and b"b" not in cache


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("hold"), st.sampled_from("abcdef")),
            st.tuples(st.just("release"), st.sampled_from("abcdef")),
        ),
        max_size=60,
    )
)
def test_no_row_is_lost_or_has_two_items(actions: list[tuple[str, str]]) -> None:
    cache, held = EncoderCache(12), list[bytes]()
    for action, name in actions:
        key, num_rows = name.encode(), 1 + "abcdef".index(name)
        if action == "release":
            if key in held:
                held.remove(key)
                cache.release(key)
        elif key in cache:
            held.append(key)
            assert len(cache.hold(key)) == num_rows
        elif cache.num_available() >= num_rows:
            held.append(key)
            assert len(cache.add(key, num_rows)) == num_rows
        cache.check(held)
    for key in held:
        cache.release(key)
    cache.forget_all()
    assert cache.num_available() == 12


def learned(max_slowdown: float) -> EncodeCosts:
    """A row takes 10 ms, and so does a step in which rows decode."""
    costs = EncodeCosts(max_slowdown)
    assert 0 < costs.parts(64, NUM_PARTS) < NUM_PARTS / 16, "no one knows yet how long they take"
    costs.observe(64, None, 0.64, 0.65, decodes=True, decodes_only=False)
    assert costs.row_s == pytest.approx(0.01)
    costs.observe(0, 0.0, 0.0, 0.01, decodes=True, decodes_only=True)
    return costs


def decode(costs: EncodeCosts, num_rows: float = 0, planned_s: float = 0.0, encode_s: float = 0.0) -> None:
    costs.observe(num_rows, planned_s, encode_s, 0.01 + encode_s, decodes=True, decodes_only=True)


def test_each_step_encodes_as_much_as_rows_that_decode_put_up_with() -> None:
    costs = learned(1.2)
    for _ in range(50):
        parts = costs.parts(64, NUM_PARTS)
        num_rows = 64 * parts / NUM_PARTS
        assert num_rows * 0.01 == pytest.approx(0.002, rel=0.01)
        decode(costs, num_rows, costs.spend(num_rows), num_rows * 0.01)
    assert costs.parts(64, 5) == 5


def test_steps_whose_parts_have_no_end_of_an_op_count_too() -> None:
    """An executor whose ops take 160 ms each, eighty times as long as a step may."""
    costs, num_rows, computed, num_steps = learned(1.2), 0.0, 0.0, 0
    while num_rows < 64:
        num_steps += 1
        if not (parts := costs.parts(64, NUM_PARTS)):
            decode(costs)
            continue
        num_rows += (some := 64 * parts / NUM_PARTS)
        planned_s = costs.spend(some)
        assert planned_s <= 0.0021
        encode_s = 0.16 if num_rows - computed >= 16 else 0.0
        computed += 16 if encode_s else 0
        decode(costs, some, planned_s, encode_s)
        assert costs.row_s == pytest.approx(0.01, rel=0.2)
    assert num_steps < 3 * 0.64 / 0.002


def test_later_steps_pay_back_what_took_longer_than_planned() -> None:
    costs = learned(1.2)
    decode(costs, 0.1, costs.spend(0.1), 0.021)
    waits = 0
    while not costs.parts(64, NUM_PARTS):
        decode(costs)
        waits += 1
    assert 9 <= waits <= 11


def test_steps_earn_no_more_than_they_may_plan_at_once() -> None:
    costs = learned(1.2)
    for _ in range(100):
        decode(costs)
    assert costs.credit_s == pytest.approx(0.004)
    costs.observe(64, None, 0.64, 0.65, decodes=True, decodes_only=False)
    assert costs.credit_s == 0, "no one waited"
