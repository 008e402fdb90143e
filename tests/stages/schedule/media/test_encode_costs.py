"""The share of time that encodes get beside streams (pipeline/stages/schedule/media/encode_costs.py)."""

import pytest

from pipeline.runtime.messages import NUM_PARTS
from pipeline.stages.schedule.media.encode_costs import EncodeCosts

STEP_S = 0.03
NUM_ROWS = 64
IMAGE_S = 1.4


def encode(costs: EncodeCosts, num_ops: int, depth: int) -> tuple[int, float]:
    """Encode an image in parts, each in a step with rows that decode, by an executor that stops only between ops of the
    same length. `depth` steps are in flight. Returns the number of steps, and the seconds that its ops took."""
    parts_of_op, done, computed, num_steps, encode_s = NUM_PARTS / num_ops, 0, 0, 0, 0.0
    in_flight: list[tuple[float, float, float]] = []
    while computed < num_ops:
        parts = costs.parts(NUM_ROWS, NUM_PARTS - done)
        num_rows = NUM_ROWS * parts / NUM_PARTS
        done += parts
        ended = num_ops if done == NUM_PARTS else int(done / parts_of_op)
        took_s, computed = (ended - computed) * IMAGE_S / num_ops, ended
        in_flight.append((num_rows, costs.spend(num_rows) if num_rows else 0.0, took_s))
        num_steps += 1
        encode_s += took_s
        while len(in_flight) >= depth or (in_flight and computed == num_ops):
            rows, planned_s, seconds = in_flight.pop(0)
            costs.observe(rows, planned_s, seconds, STEP_S + seconds, decodes=True, decodes_only=True)
    return num_steps, encode_s


@pytest.mark.parametrize("num_ops", [1000, 100, 40, 10])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slowdown", [1.1, 1.5])
def test_encodes_get_their_whole_share_whatever_an_op_takes(num_ops: int, depth: int, slowdown: float) -> None:
    costs = EncodeCosts(slowdown)
    encode(costs, num_ops, depth)  # what a row takes is learned
    num_steps = 0
    for _ in range(4):
        steps, seconds = encode(costs, num_ops, depth)
        assert seconds == pytest.approx(IMAGE_S)
        num_steps += steps
    assert num_steps == pytest.approx(4 * IMAGE_S / (STEP_S * (slowdown - 1)), rel=0.1)
