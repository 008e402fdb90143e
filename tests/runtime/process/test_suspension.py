"""A process notices that it did not run."""

from pipeline.runtime.process.suspension import MIN_S, Suspension


def test_only_a_turn_that_took_much_too_long_is_a_suspension() -> None:
    now_s = 100.0
    suspension = Suspension(lambda: now_s)
    now_s += 1000.0
    suspension.begin()
    assert suspension.turn() == 0.0, "the loop was not running"
    for took_s, expected_s in ((MIN_S - 0.1, 0.0), (MIN_S, MIN_S), (0.5, 0.0), (90.0, 90.0), (0.0, 0.0)):
        now_s += took_s
        assert suspension.turn() == expected_s


def test_what_a_loop_waits_on_purpose_is_no_suspension() -> None:
    now_s = 100.0
    suspension = Suspension(lambda: now_s)
    suspension.begin()
    for took_s, expected_s in ((4.0 + MIN_S - 0.1, 0.0), (4.0 + MIN_S, MIN_S)):
        suspension.sleep(4.0)
        now_s += took_s
        assert suspension.turn() == expected_s
    now_s += MIN_S
    assert suspension.turn() == MIN_S, "it did not wait"
