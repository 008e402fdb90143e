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
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.test_scopes import post

MOST = 32
LIMITS = RequestLimits("m", 64, hidden_size=512, tasks=get_args(Task), pooler=Pooler(pooling="cls", width=512))


def opened(gate: Gate, key: str, num: int, **fields: Any) -> "tuple[list[Future[Any]], list[Submit]]":
    responses, submits = [], []
    for _ in range(num):
        responses.append(post(gate, key, CHAT | fields))
        submits.append(gate.begin())
    return responses, submits


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
