"""No API key can take all places: others find some at once."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pipeline.runtime.messages import Submit
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.test_scopes import post

MOST = 32


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
