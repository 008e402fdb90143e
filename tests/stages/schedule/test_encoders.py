"""Texts of an encoder: computed whole, packed into steps, fairly by scope, and again if the executor dies."""

import numpy as np
import pytest

from pipeline.config.sections.stages import ENCODER_STEP_TOKENS, ScheduleSettings
from pipeline.runtime import messages as m
from pipeline.stages.schedule.policies.budget import BudgetLimits, StepBudget
from pipeline.stages.schedule.policies.fair_shares import MAX_IDLE_SCOPES, FairShares
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.stages.schedule.bench import Bench, config, inline
from tests.stages.schedule.recovery.test_liveness import ids


def encoder(step_tokens: int = 64, depth: int = 1, **changes: object) -> Bench:
    values: dict[str, object] = {"num_blocks": 400, "max_model_len": 256, "max_num_seqs": 32, "long_prompt_tokens": 100}
    return Bench(config(generates=False, **(values | changes)).of_encoder(step_tokens), depth)


def embed(bench: Bench, length: int, scope_id: str = "") -> int:
    return bench.admit(ids(len(bench.admitted), length), max_tokens=1, scope_id=scope_id)


def next_step(bench: Bench) -> list[int]:
    """Compute the next step. Returns the requests in it."""
    bench.fill()
    requests = [add.request_id for add in bench.steps[0].adds]
    bench.answer()
    bench.report()
    return requests


def test_texts_are_packed_without_padding_and_none_is_cut() -> None:
    bench = encoder(step_tokens=64)
    first, second, third, small, last = (embed(bench, length) for length in (30, 30, 30, 4, 40))
    bench.fill()
    (step,) = bench.steps
    assert np.frombuffer(inline(step.counts), np.int32).tolist() == [30, 30, 4], (
        "the third does not fit, a later one does"
    )
    assert [add.request_id for add in step.adds] == [first, second, small]
    bench.answer()
    assert next_step(bench) == [third]
    assert next_step(bench) == [last]
    bench.run()
    bench.check_outputs()
    assert len(bench.finished) == 5


def test_a_step_begins_with_the_first_text_whatever_its_length() -> None:
    """One with more tokens than a step usually has is alone in its own, and one may have max_model_len tokens."""
    bench = encoder(step_tokens=64)
    longest, other = embed(bench, 256), embed(bench, 10)
    assert next_step(bench) == [longest]
    assert next_step(bench) == [other]
    refused = bench.admit(ids(9, 257), max_tokens=1)
    assert [one.request_id for one in bench.refused] == [refused]
    bench.run()
    bench.check_outputs()


def test_between_two_long_texts_short_ones_are_computed() -> None:
    bench = encoder(step_tokens=64)
    longs = [embed(bench, 200) for _ in range(3)]
    assert next_step(bench) == longs[:1]
    shorts = [embed(bench, 20) for _ in range(5)]
    assert next_step(bench) == shorts[:3]
    assert next_step(bench) == [longs[1]], "short ones do not keep long ones waiting either"
    assert next_step(bench) == shorts[3:]
    assert next_step(bench) == [longs[2]]


def test_a_lower_priority_value_goes_before_shorter_texts() -> None:
    bench = encoder(step_tokens=64, policy="priority")
    longs = [bench.admit(ids(i, 200), max_tokens=1, priority=0) for i in range(2)]
    short = bench.admit(ids(2, 20), max_tokens=1, priority=1)
    assert [next_step(bench) for _ in range(3)] == [[longs[0]], [longs[1]], [short]]
    assert bench.scheduler.load().num_preemptions == 0


def test_a_scope_with_many_texts_leaves_others_their_share() -> None:
    bench = encoder(step_tokens=100)
    many = [embed(bench, 20, "a") for _ in range(50)]
    assert next_step(bench) == many[:5]
    few = [embed(bench, 20, "b") for _ in range(4)]
    mixed = next_step(bench) + next_step(bench)
    assert len(set(few) & set(mixed)) == 4, "each gets half of the tokens"
    assert [one for one in mixed if one in many] == many[5:11], "in the order in which they came"
    assert next_step(bench) == many[11:16]


def test_a_scope_saves_nothing_up_while_it_has_no_texts() -> None:
    shares = FairShares()
    first = shares.tag("a", 100, None)
    assert shares.tag("a", 100, first) == 100
    assert shares.tag("b", 10, first) == 0, "it begins beside the first"
    assert shares.tag("b", 10, 100) == 100, "and later, where the others are"
    assert shares.tag("c", 10, None) == 200, "behind all that was computed"
    for number in range(3 * MAX_IDLE_SCOPES):
        shares.tag(f"scope {number}", 1, 1000 + number)
    assert len(shares._ends) <= MAX_IDLE_SCOPES + 1


@pytest.mark.parametrize("depth", [1, 2])
def test_texts_are_computed_again_when_the_executor_dies(depth: int) -> None:
    bench = encoder(step_tokens=64, depth=depth)
    requests = [embed(bench, 25) for _ in range(12)]
    bench.fill()
    bench.lose_executor(num_run=1)
    bench.check()
    bench.run()
    bench.check_outputs()
    assert {bench.admitted[seq][0].request_id for seq in bench.finished} == set(requests)
    assert bench.scheduler.load().num_blocks_held == 0


def test_no_setting_keeps_what_an_encoder_computes() -> None:
    settings = ScheduleSettings(policy="priority", preemption="swap", max_num_batched_tokens=4096)
    facts = m.ExecuteFacts(100, 16, 512, 30000, num_swap_blocks=50, max_num_prefill_tokens=4096, is_encoder=True)
    chosen = SchedulerConfig.of(settings, facts)
    assert (chosen.is_encoder, chosen.prefix_caching, chosen.num_swap_blocks, chosen.offloads) == (
        True,
        False,
        0,
        False,
    )
    assert chosen.max_num_batched_tokens == chosen.max_chunk == 4096
    assert SchedulerConfig.of(ScheduleSettings(), facts).max_num_batched_tokens == ENCODER_STEP_TOKENS


def test_whole_texts_beside_decoding_rows_take_their_tokens_and_time() -> None:
    """As for the decoder and the encoder of one executor."""
    model = StepCostModel()
    for turn in range(400):
        num, count = turn % 17, turn * 7 % 90
        model.observe(num, num * 100, count, count * count / 2, 0.001 * (1 + num + count))
    budget = StepBudget(BudgetLimits(100, step_s=0.06), model, 20, 2000)
    assert budget.chunk(0, 30, False, whole=True) == 30
    assert budget.tokens == 50 and budget.shape.pairs == 30 * 30
    assert budget.chunk(0, 51, False, whole=True) == 0, "it is not cut"
    assert budget.chunk(0, 20, False, whole=True) == 20
    assert budget.chunk(0, 5, False, whole=True) == 0, "the time is used up"


def test_the_executor_of_an_encoder_is_not_woken_before_a_step() -> None:
    """It would wait awake, and give up before the next texts are planned."""
    bench = encoder(step_tokens=64)
    for _ in range(4):
        embed(bench, 30)
    bench.fill()
    assert bench.scheduler.num_waiting == bench.scheduler.num_running == 2
    assert not bench.scheduler.expects_step
    decoder = Bench(config(), 1)
    decoder.admit(range(10), max_tokens=3)
    decoder.fill()
    assert decoder.scheduler.expects_step
