"""Which restarts are made, and who is informed of them when."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.supervisor.restart.recovery import (
    DEATHS_OF_A_REQUEST,
    DELAYS_S,
    MAX_FAILED_STARTS,
    WINDOW_S,
    Recovery,
    RestartBudget,
)
from tests.slices import part_of

STAGES = ("ingest.0", "ingest.1", "schedule.0", "execute.0", "detokenize.0")
GATEWAYS = ("gateway.0", "gateway.1")
NAMES = STAGES + GATEWAYS


def test_the_delay_grows_with_each_death_within_the_window():
    budget = RestartBudget(5)
    assert [budget.died("execute.0", 1.0 + i, was_ready=True) for i in range(5)] == list(DELAYS_S)
    assert budget.died("ingest.0", 6.0, was_ready=True) == 0
    assert "6 times within 60 s (supervisor.max_restarts)" in str(budget.died("execute.0", 7.0, was_ready=True))


def test_deaths_outside_the_window_are_forgotten():
    budget = RestartBudget(1)
    for i in range(20):
        assert budget.died("execute.0", i * WINDOW_S, was_ready=True) == 0


def test_two_bad_requests_one_after_the_other_do_not_end_the_server():
    """Each of them dies beside one other request: the group stays the same until they run alone."""
    budget = RestartBudget(5)
    first, second, innocent = 1, 2, 3
    deaths = [(second, first)] * 3 + [(first,)] + [(second, innocent)] * 3 + [(second,)]
    assert [budget.died("schedule.0", float(i), was_ready=True, suspects=one) for i, one in enumerate(deaths)] == [
        0
    ] * 8


@pytest.mark.parametrize("max_restarts", [1, 5])
@pytest.mark.parametrize("stage", ["ingest", "schedule", "execute", "detokenize"])
def test_no_number_of_bad_requests_ends_the_server(stage, max_restarts):
    """Each is alone at last, beside innocent ones that are in all deaths before."""
    budget = RestartBudget(max_restarts)
    innocent = range(1_000_000, 1_000_032)
    for number in range(200):
        for others in (innocent, innocent[:3], ()):
            suspects = [number, *others]
            assert budget.died(f"{stage}.0", 0.01 * number, was_ready=True, suspects=suspects) == 0


def test_bad_requests_among_many_do_not_count():
    """Two bad requests among 32, in the groups of the executor's quarantine."""
    budget = RestartBudget(2)
    deaths = [range(32), range(8), range(2), range(1), range(8, 16), range(8, 10), range(8, 9)]
    assert [budget.died("execute.0", float(i), was_ready=True, suspects=one) for i, one in enumerate(deaths)] == [0] * 7


def test_deaths_without_suspects_count_beside_those_of_requests():
    budget = RestartBudget(2)
    for number, delay_s in enumerate(DELAYS_S[:2]):
        assert budget.died("execute.0", 2.0 * number, was_ready=True) == delay_s
        assert budget.died("execute.0", 2.0 * number + 1, was_ready=True, suspects=[number]) == 0
    assert "it has died 5 times" in str(budget.died("execute.0", 5.0, was_ready=True))


@pytest.mark.parametrize("suspects", [(1,), (1, 2)])
def test_requests_in_many_deaths_are_not_the_reason(suspects):
    """They were cleared again and again."""
    budget = RestartBudget(2)
    found = [budget.died("execute.0", float(i), was_ready=True, suspects=suspects) for i in range(DEATHS_OF_A_REQUEST)]
    assert found == [0] * DEATHS_OF_A_REQUEST
    assert [budget.died("execute.0", 9.0 + i, was_ready=True, suspects=suspects) for i in range(2)] == [0, DELAYS_S[1]]
    assert budget.died("execute.0", 12.0, was_ready=True, suspects=[*suspects, 3]) == 0, "a request came since then"
    assert isinstance(budget.died("execute.0", 13.0, was_ready=True, suspects=suspects), str)


def test_a_request_that_ends_leaves_the_others_with_their_deaths():
    """One request fewer at each death is no reason to go on for ever."""
    budget = RestartBudget(2)
    num = 0
    while isinstance(budget.died("execute.0", 0.1 * num, was_ready=True, suspects=range(max(1, 32 - num))), float):
        num += 1
    assert num == DEATHS_OF_A_REQUEST + 2


def test_a_gateway_starts_again_however_often_requests_kill_it():
    """It takes with it what is known of them."""
    budget = RestartBudget(2)
    found = [budget.died("gateway.0", float(i), was_ready=True) for i in range(50)]
    assert found == [*DELAYS_S, *[DELAYS_S[-1]] * 45]
    assert isinstance(budget.died("gateway.0", 50.0, was_ready=False), str)
    assert isinstance(RestartBudget(0).died("gateway.0", 1.0, was_ready=True), str)


def test_without_restarts_the_first_death_is_the_last():
    assert "max_restarts is 0" in str(RestartBudget(0).died("execute.0", 1.0, was_ready=True))


def test_a_stage_that_never_gets_ready_is_given_up():
    budget = RestartBudget(1000)
    for i in range(MAX_FAILED_STARTS - 1):
        assert isinstance(budget.died("execute.0", float(i), was_ready=False), float)
    assert "before they were ready" in str(budget.died("execute.0", 9.0, was_ready=False))


def test_one_ready_process_between_failed_starts_resets_their_count():
    budget = RestartBudget(1000)
    for i in range(20):
        assert isinstance(budget.died("execute.0", float(i), was_ready=i % MAX_FAILED_STARTS == 0), float)


def test_a_gateway_starts_when_all_stages_use_the_newest_channels():
    recovery = Recovery()
    first = recovery.died("gateway.0", ["ingest.0", "schedule.0"], ["gateway.1"])
    second = recovery.died("ingest.0", ["schedule.0"], ["gateway.1"])
    for epoch, name in ((first, "schedule.0"), (second, "schedule.0")):
        assert not recovery.may_start("gateway.0")
        assert recovery.may_start("ingest.0")
        recovery.answered(name, epoch)
    assert recovery.may_start("gateway.0"), "it need not wait for gateways, nor for what has died"


def test_gateways_learn_of_restarts_in_order_though_the_later_one_is_known_to_all_stages_first():
    recovery = Recovery()
    first = recovery.died("schedule.0", ["ingest.0", "execute.0"], ["gateway.0"])
    second = recovery.died("detokenize.0", ["schedule.0"], ["gateway.0"])
    recovery.answered("schedule.0", second)
    recovery.answered("ingest.0", first)
    assert recovery.rounds_for_gateways() == []
    recovery.answered("execute.0", first)
    assert [one.epoch for one in recovery.rounds_for_gateways()] == [first, second]
    assert recovery.rounds_for_gateways() == [], "each once"


class Histories(RuleBasedStateMachine):
    """Random deaths and answers. Each process answers what it was sent, in any order relative to others."""

    def __init__(self) -> None:
        super().__init__()
        self.recovery = Recovery()
        self.informed: dict[str, list[tuple[int, str]]] = {name: [] for name in NAMES}
        """What each living process was sent: epoch and name."""
        self.unanswered: dict[str, list[int]] = {name: [] for name in NAMES}
        self.last_death: dict[str, int] = dict.fromkeys(NAMES, 0)

    @rule(name=st.sampled_from(NAMES))
    def die(self, name):
        stages = [other for other in STAGES if other != name]
        epoch = self.recovery.died(name, stages, GATEWAYS)
        self.informed[name], self.unanswered[name] = [], []  # its successor starts with the newest channels
        self.last_death[name] = epoch
        for other in stages:
            self.tell(other, epoch, name)
        self.tell_gateways()

    def tell(self, other, epoch, name):
        self.informed[other].append((epoch, name))
        self.unanswered[other].append(epoch)

    def tell_gateways(self):
        for one in self.recovery.rounds_for_gateways():
            for gateway in one.gateways:
                assert all(one.epoch not in self.unanswered[stage] for stage in STAGES), "a stage has not answered yet"
                self.tell(gateway, one.epoch, one.name)

    @precondition(lambda self: any(self.unanswered.values()))
    @rule(data=st.data())
    def answer(self, data):
        name = data.draw(st.sampled_from([name for name in NAMES if self.unanswered[name]]))
        self.recovery.answered(name, self.unanswered[name].pop(0))
        self.tell_gateways()

    @invariant()
    def each_process_is_informed_in_order(self):
        for informed in self.informed.values():
            epochs = [epoch for epoch, _ in informed]
            assert epochs == sorted(set(epochs))

    @invariant()
    def it_is_over_when_all_have_answered(self):
        if not any(self.unanswered.values()):
            assert self.recovery.is_over

    def teardown(self):
        """When everybody answers, everybody living knows of the newest process of each other one."""
        while any(self.unanswered.values()):
            for name in NAMES:
                if self.unanswered[name]:
                    self.recovery.answered(name, self.unanswered[name].pop(0))
                    self.tell_gateways()
        assert self.recovery.is_over
        for name, informed in self.informed.items():
            for other, epoch in self.last_death.items():
                if other != name and epoch > self.last_death[name]:
                    assert (epoch, other) in informed


Histories.TestCase.settings = settings(max_examples=part_of(80, 20), stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase
