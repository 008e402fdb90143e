"""What a model's pooler makes goes from schedule to the gateway; detokenize has no part in it."""

from typing import Any

import pytest

from pipeline.config.settings import GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish, Pooling
from tests.rig import Rig, raw
from tests.stages.schedule.bench import Bench, config
from tests.stages.schedule.neighbours import FACTS, Neighbours

POOLED: dict[str, Any] = {"max_tokens": 1, "pooling": Pooling.MEAN}
FEW_GATEWAYS = Settings(gateway=GatewaySettings(replicas=2))


def admit(rig: Rig, request_id: int, gateway: int = 0) -> None:
    ids = rig.arena("ingest.0").put(bytes(4 * 20), readers=("schedule.0",))
    rig.send(m.Admit(request_id, 1, gateway, 0.0, ids, raw(m.GenerationOptions(**POOLED))), "ingest.0")


def settled(gateways: int = 1, num: int = 3, **changes: Any) -> Bench:
    """A scheduler with `num` replies that are pending."""
    bench = Bench(config(**changes), depth=1)
    for number in range(num):
        bench.admit(range(number, number + 20), **POOLED)
    bench.run()
    return bench


def test_a_pooled_prompt_is_answered_without_detokenize() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        admit(rig, 7)
        around.step()
        deltas = rig.receive("gateway", m.Deltas)
        assert (deltas.request_ids, deltas.attempts, deltas.indexes) == ([7], [1], [0])
        assert (deltas.finishes, deltas.num_ids, deltas.id_offsets, deltas.texts) == ([Finish.LENGTH], [1], [0], [""])
        assert [first.index for first in deltas.firsts] == [0] and deltas.sent_s == deltas.settled_s > 0
        assert rig.nothing("detokenize")
        rig.send(m.Closed(7, 1), "gateway.0")
        rig.until(lambda load: load.num_blocks_held == 0)


def test_each_gateway_gets_its_own() -> None:
    with Rig("schedule", FEW_GATEWAYS) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        for number in (1, 2, 3):
            admit(rig, number, gateway=number % 2)
        rig.load()
        for _ in range(2):
            if not rig.nothing("execute", 0.5):
                around.step()
        found = {0: [], 1: []}  # type: dict[int, list[int]]
        for gateway, num in ((0, 1), (1, 2)):
            while len(found[gateway]) < num:
                name = f"gateway.{gateway}" if gateway else "gateway"
                found[gateway] += rig.receive(name, m.Deltas).request_ids
        assert found == {0: [2], 1: [1, 3]}


def test_an_aborted_prompt_is_closed() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        admit(rig, 7)
        rig.load()
        rig.send(m.Abort(7, 1), "gateway.0")
        deltas = rig.receive("gateway", m.Deltas)
        assert (deltas.request_ids, deltas.finishes, deltas.num_ids) == ([7], [Finish.ABORT], [0])


def test_replies_that_a_full_edge_refused_go_with_the_next_ones() -> None:
    bench = settled(num=3)
    pooled = bench.scheduler.output_buffer.pooled
    assert pooled.message(0, 1.0).request_ids == [1, 2, 3]
    bench.admit(range(50, 60), **POOLED)
    bench.run()
    assert pooled.message(0, 2.0).request_ids == [1, 2, 3, 4], "they were not sent"
    pooled.mark_sent(0)
    assert not pooled.pending and not bench.opened and not bench.finished


def test_a_gateway_that_has_died_gets_none() -> None:
    bench = settled(num=3)
    bench.admit(range(50, 60), **POOLED)
    bench.scheduler.gateway_lost(0)
    assert not bench.scheduler.output_buffer.pooled.pending and not bench.scheduler.requests


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_detokenize_that_has_died_does_not_matter(is_removed: bool) -> None:
    bench = settled(num=2)
    bench.scheduler.output_buffer.pooled.mark_sent(0)
    bench.admit(range(50, 60), **POOLED)
    assert bench.scheduler.resend(0, is_removed=is_removed) == []
    bench.run()
    assert bench.scheduler.output_buffer.pooled.message(0, 1.0).request_ids == [3]


def test_a_prompt_that_is_here_already_is_not_computed_twice() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        admit(rig, 7)
        admit(rig, 7)
        around.step()
        assert rig.receive("gateway", m.Deltas).request_ids == [7]
        assert rig.load().num_steps == 1 and rig.nothing("gateway", 0)
