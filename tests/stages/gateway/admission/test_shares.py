"""No API key can take all places: others find some at once. Results of poolers have their room before they come."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline.runtime.messages import Submit
from pipeline.runtime.model.pooler import Pooler, Task
from pipeline.stages.gateway.admission import open_bytes
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.apis.pooling.parsing import parse_pooling
from pipeline.stages.gateway.errors import Overloaded
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.stages.gateway.admission.test_preemption import MAX_BYTES, NUM_TOP, end, grow
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.test_scopes import bearer, post

MOST = 32
LIMITS = RequestLimits("m", 64, hidden_size=512, tasks=get_args(Task), pooler=Pooler(pooling="cls", width=512))


def opened(gate: Gate, key: str, num: int, **fields: Any) -> "tuple[list[Future[Any]], list[Submit]]":
    responses, submits = [], []
    for _ in range(num):
        responses.append(post(gate, key, CHAT | fields))
        submits.append(gate.begin())
    return responses, submits


def open_bytes_of(gate: Gate) -> int:
    gate.rig.load()
    found: int = gate.client.get("/load", headers=bearer(KEY)).json()["open_bytes"]
    return found


def test_a_key_leaves_an_eighth_of_the_sequences_to_others(tmp_path: Path) -> None:
    with locked(tmp_path, max_open_sequences=MOST) as gate:
        responses, submits = opened(gate, KEY, MOST * 7 // 8)
        refused = post(gate, KEY).result()
        assert refused.status_code == 503 and "29 sequences of this API key are open" in refused.text
        others, more = opened(gate, SECOND, 3)
        assert post(gate, SECOND).result().status_code == 503
        for submit in (*submits, *more):
            gate.finish(submit)
        assert {one.result().status_code for one in (*responses, *others)} == {200}
        gate.rig.until(lambda load: load.num_open_requests == 0)
        again, submits = opened(gate, KEY, 1, n=MOST)
        for index in range(MOST):
            gate.finish(submits[0], index=index)
        assert again[0].result().status_code == 200, "a request alone may have all"


def test_the_output_of_a_key_leaves_an_eighth_of_the_bytes_to_others(tmp_path: Path) -> None:
    """Complete replies with log probabilities are small when they are admitted, and grow."""
    large = {"logprobs": True, "top_logprobs": NUM_TOP, "max_tokens": 180}
    with locked(tmp_path, max_open_bytes=MAX_BYTES) as gate:
        responses, submits = opened(gate, KEY, 3, **large)
        for number in range(60):
            grow(gate, submits[number % 3], 1)
            open_bytes = open_bytes_of(gate)
            if not gate.rig.nothing("schedule", 0.0):
                break
            assert open_bytes <= MAX_BYTES * 7 // 8
        else:
            raise AssertionError("no request was preempted")
        closed = gate.closed()
        assert closed[0] in {one.request_id for one in submits} and open_bytes_of(gate) <= MAX_BYTES * 7 // 8
        left = [one for one in submits if one.request_id != closed[0]]
        number = 0
        while open_bytes_of(gate) < MAX_BYTES * 4 // 5:
            grow(gate, left[number % 2], 1)
            number += 1
        refused = post(gate, KEY, CHAT | {"messages": [{"role": "user", "content": "a" * 30_000}]}).result()
        assert refused.status_code == 503 and "of this API key are open" in refused.text
        other, (small,) = opened(gate, SECOND, 1)
        gate.finish(small)
        assert other[0].result().status_code == 200
        for one in left:
            end(gate, one)
        again = gate.submit()
        assert again.request_id == closed[0]
        gate.continue_at(again, 0, 0)
        gate.accept(again)
        end(gate, again)
        assert {one.result().status_code for one in responses} == {200}


def test_the_key_with_the_most_output_gives_way(tmp_path: Path) -> None:
    """Not the one with the largest request."""
    large = {"logprobs": True, "top_logprobs": NUM_TOP, "max_tokens": 180}
    with locked(tmp_path, max_open_bytes=MAX_BYTES) as gate:
        small, submits = opened(gate, KEY, 4, **large)
        alone, (single,) = opened(gate, SECOND, 1, **large)
        grow(gate, single, 8)
        for number in range(60):
            grow(gate, submits[number % 4], 1)
            open_bytes_of(gate)
            if not gate.rig.nothing("schedule", 0.0):
                break
        closed = gate.closed()
        assert closed[0] in {one.request_id for one in submits}
        for one in (single, *(one for one in submits if one.request_id != closed[0])):
            end(gate, one)
        assert alone[0].result().status_code == 200
        again = gate.submit()
        gate.continue_at(again, 0, 0)
        gate.accept(again)
        end(gate, again)
        assert {one.result().status_code for one in small} == {200}


def test_results_of_poolers_count_before_they_come() -> None:
    """They come all at once, so no request could wait for room any more: 1,024 for the vectors of 512 tokens took four
    times the limit."""
    admission = Admission(1024, 10**6, 100_000)
    admission.admit(1, 1, 0.0, 1000, 60_000)
    admission.take(1, 1, 0.0, 1000, 60_000)
    with pytest.raises(Overloaded, match="39000 of 100000"):
        admission.admit(1, 1, 0.0, 1000, 60_000)
    admission.give(1, 1, 1.0, 61_000, 1000)
    assert (admission.num_bytes, admission.num_base_bytes) == (0, 0)
    body = {"model": "m", "input": "a" * 100, "task": "token_embed"}
    parsed = open_bytes.measured(parse_pooling(json.dumps(body).encode(), LIMITS))
    assert open_bytes.pooled_bytes(parsed, 512, 80)[0] >= 80 * 512 * 4 * 6
