"""Resume points that no server wrote: none of their numbers reaches another request, and none of their requests waits
for ever."""

import binascii
import contextlib
import json
import os
import time
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.runtime import messages as m
from pipeline.runtime.resume_points import RESUME
from pipeline.stages.gateway.apis.openai import parsing as parse
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing import resumption
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.resumption import MAX_UNIX_S, digest_of
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import COMPLETION, FACTS, MODEL, Gate
from tests.stages.gateway.http.test_resumption import merged, points_of, send
from tests.stages.gateway.test_metrics import counts_of

CASES = 20 if os.environ.get("PIPELINE_ALL_CASES") else 1
BODY = COMPLETION | {"stream": True, "max_tokens": 8}
PATH = "/v1/completions"
DIGEST = digest_of(np.arange(3, dtype=np.int32))
"""Of the prompt's ids that `Gate.accept` sends."""
FIRST = {"id": "cmpl-1", "created": 1, "arrival_s": 1.0, "seed": 1, "salt": 0, "prompt": DIGEST}

EXTREME = st.one_of(
    st.sampled_from(
        [
            *("0", "1", "-1", "1e308", "-1e308", "1e400", "1e-320", "NaN", "Infinity", "-Infinity", "4294967295.9"),
            *("1" + "0" * 30, "-1" + "0" * 30, "9" * 5000, "0." + "3" * 5000, "18446744073709551616", "253402300800"),
            *("null", "true", '""', "[]", "{}", "[" + "1," * 5000 + "1]", '"\\ud800"'),
        ]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=400).map(json.dumps),
)
NUM_CHARS = st.one_of(st.sampled_from(["0", "1", "2", "999999999", "9" * 10, "9" * 11, "9" * 5000, "-1", "nan"]))


@st.composite
def forged(draw: st.DrawFn) -> bytes:
    """A first point with some extreme fields, and lines behind it."""
    fields = {name: json.dumps(value) for name, value in FIRST.items()}
    for name in draw(st.sets(st.sampled_from(sorted(fields)), max_size=2)):
        fields[name] = draw(EXTREME)
    lines = [": point {" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"]
    for _ in range(draw(st.integers(0, 3))):
        ids = np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=10)), "<i4").tobytes()
        index, ended = draw(st.sampled_from(["0", "0", "1", "9" * 4])), draw(st.sampled_from("001"))
        lines.append(f": point {index} {draw(NUM_CHARS)} {ended} {binascii.b2a_base64(ids, newline=False).decode()}")
    return ("\n".join(lines) + "\n").encode()


def points(num_chars: int, ended: int = 0, num_ids: int = 2, **fields: Any) -> str:
    ids = binascii.b2a_base64(np.arange(num_ids, dtype="<i4").tobytes(), newline=False).decode()
    return f": point {json.dumps(FIRST | fields)}\n: point 0 {num_chars} {ended} {ids}\n"


def resumed(text: bytes, now_s: float) -> ParsedRequest:
    limits = RequestLimits(MODEL, 8, max_prompt_tokens=FACTS.max_model_len, vocab_size=1000)
    parsed = parse.parse_completion(json.dumps(BODY).encode(), limits)
    return resumption.with_resume_points(parsed, text, now_s, FACTS.max_model_len)


@settings(max_examples=100 * CASES, deadline=None)
@given(text=forged(), now_s=st.floats(1, MAX_UNIX_S))
def test_a_field_is_refused_or_within_its_bounds(text: bytes, now_s: float) -> None:
    try:
        parsed = resumed(text, now_s)
    except ApiError as error:
        assert error.status == HTTPStatus.BAD_REQUEST and error.param == RESUME
        return
    point = parsed.resumption
    assert point is not None
    assert 0 <= point.created < MAX_UNIX_S and 0 <= point.arrival_s <= now_s and 0 <= point.age_s <= now_s
    assert parsed.seed is not None and 0 <= parsed.seed < 2**64 and 0 <= point.salt < 2**64
    assert parsed.received_s == 0, "only the deadline is nearer"
    assert sum(map(len, parsed.outputs)) <= 4 * 8
    msgspec.msgpack.encode([parsed.resumption, parsed.outputs, parsed.options, parsed.seed])


@pytest.fixture(scope="module")
def shared_gate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Gate(tmp_path_factory.mktemp("gate")) as gate:
        yield gate


def idle(gate: Gate) -> None:
    """Wait until nothing is open, so all credits have returned."""
    assert gate.rig.until(lambda load: load.num_open_requests == 0).num_open_requests == 0


@settings(max_examples=25 * CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=forged())
def test_a_gateway_answers_whatever_the_points_say(shared_gate: Gate, text: bytes) -> None:
    gate = shared_gate
    arrived_s = time.time()
    head = {RESUME: str(len(text)), "Content-Type": "application/json"}
    response = gate.do(gate.client.post, PATH, content=text + json.dumps(BODY).encode(), headers=head)
    submit = None
    while submit is None and not response.done():
        with contextlib.suppress(TimeoutError, AssertionError):
            submit = gate.rig.receive("ingest", m.Submit, 0.05)
    if submit is not None:
        assert arrived_s - 1 <= submit.arrival_s <= time.time(), "the scheduler's order"
        gate.accept(submit)
        num_ids = len(bytes(submit.outputs[0])) // 4 if submit.outputs else 0
        gate.continue_at(submit, 0, num_ids)
        gate.delta(submit, "ab" if num_ids else "", num_ids=0)
        gate.delta(submit, "c", finish=m.Finish.STOP)
    result: httpx.Response = response.result(PATIENCE_S)
    assert result.status_code in (200, 400), result.text
    if result.status_code == HTTPStatus.BAD_REQUEST:
        assert result.json()["error"]["param"] == RESUME
    idle(gate)
    counts = counts_of(gate)
    for histogram in (counts.time_to_first_token_s, counts.e2e_s):
        assert 0 <= histogram.total < 60 * max(1, sum(histogram.counts)), "times since the arrival here"


def test_text_that_its_ids_dont_have_is_an_error_as_soon_as_they_are_decoded(gate: Gate) -> None:
    response = send(gate, PATH, BODY, points(999_999_999))
    submit = gate.begin()
    gate.continue_at(submit, 0, 2)
    gate.delta(submit, "ab", num_ids=0)  # all text of the ids; nothing has been generated
    error = response.result().json()["error"]
    assert (response.result().status_code, error["param"]) == (400, RESUME)
    assert "2 characters" in error["message"] and "999999999" in error["message"]
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
    gate.delta(submit, finish=m.Finish.ABORT)
    idle(gate)


@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("finish", [m.Finish.STOP, m.Finish.LENGTH])
def test_text_that_has_not_come_at_the_end_is_an_error(gate: Gate, ended: int, finish: m.Finish) -> None:
    response = send(gate, PATH, BODY, points(999, ended))
    submit = gate.begin()
    gate.continue_at(submit, 0, 2)
    gate.delta(submit, "abc", num_ids=0, finish=finish)
    assert response.result().status_code == 400
    idle(gate)


def test_an_end_that_its_ids_dont_have_is_an_error(gate: Gate) -> None:
    response = send(gate, PATH, BODY, points(2, ended=1))
    submit = gate.begin()
    gate.continue_at(submit, 0, 2)
    gate.delta(submit, "ab", num_ids=0)
    gate.rig.load()
    assert not response.done(), "the end may come without further ids"
    gate.delta(submit, "c")
    assert response.result().status_code == 400
    gate.delta(submit, finish=m.Finish.ABORT)
    idle(gate)


def test_an_abort_ends_the_wait_for_the_repeated_text(gate: Gate) -> None:
    response = send(gate, PATH, BODY, points(999_999_999, id="cmpl-mine"))
    submit = gate.begin()
    gate.rig.load()
    assert gate.client.post("/abort_requests", json={"request_ids": ["cmpl-mine"]}).json()["num_aborted"] == 1
    gate.continue_at(submit, 0, 2)
    gate.delta(submit, "", num_ids=0, finish=m.Finish.ABORT)
    (event,) = merged(response.result().text)
    assert event[0][-1] == "abort", event
    idle(gate)


@pytest.mark.parametrize("text", ["", points(2)])
def test_an_abort_before_the_prompt_is_tokenized_ends_a_stream_with_points(gate: Gate, text: str) -> None:
    response = send(gate, PATH, BODY | {"request_id": "mine"}, text)
    submit = gate.submit()
    name = "cmpl-1" if text else "mine"
    assert gate.client.post("/abort_requests", json={"request_ids": [name]}).json()["num_aborted"] == 1
    gate.reject(submit, m.Failure(400, "aborted", code="aborted"))
    result = response.result()
    assert result.status_code == 200 and '"finish_reason":"abort"' in result.text, result.text
    idle(gate)


def test_a_drain_ends_while_points_claim_more_text(gate: Gate) -> None:
    response = send(gate, PATH, BODY, points(999_999_999, ended=1))
    submit = gate.begin()
    gate.continue_at(submit, 0, 2)
    gate.delta(submit, "ab", num_ids=0)
    gate.rig.load()
    gate.rig.send(m.Drain(0.05))
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
    gate.delta(submit, finish=m.Finish.ABORT)
    gate.rig.receive("supervisor", m.Drained)
    assert response.result().status_code in (400, 503)


def test_the_first_arrival_brings_only_the_deadline_nearer(gate: Gate) -> None:
    now_s = time.time()
    old = send(gate, PATH, BODY | {"timeout_s": 50}, points(2, arrival_s=now_s - 60))
    assert old.result().status_code == 504
    send(gate, PATH, BODY | {"timeout_s": 50}, points(2, arrival_s=now_s + 3600))  # a clock ahead
    young = gate.begin()
    assert now_s - 1 <= young.arrival_s <= time.time() and now_s - 1 <= young.template_s <= time.time()
    send(gate, PATH, BODY, points(2, arrival_s=now_s - 3600))
    resumed_one = gate.begin()
    assert resumed_one.arrival_s >= young.arrival_s, "it waits behind what came before"
    assert resumed_one.template_s == pytest.approx(now_s - 3600), "its template writes the same date"
    for submit in (young, resumed_one):
        gate.continue_at(submit, 0, 2)
        gate.delta(submit, "ab", num_ids=0)
        gate.finish(submit, "c")
    idle(gate)
    assert counts_of(gate).e2e_s.total < 60


@pytest.mark.parametrize(
    "lines",
    [": point 0 2 0 \n" * 2, points(3).split("\n")[1] + "\n: point 0 2 0 AAAAAA==\n", ": point 0 1 1 \n" * 2],
    ids=["nothing new", "less text", "behind the end"],
)
def test_points_that_say_nothing_new_are_refused(gate: Gate, lines: str) -> None:
    """So their number is bounded by that of the ids, and reading them costs little."""
    result = send(gate, PATH, BODY, points_of(points(0)).split("\n")[0] + "\n" + lines).result()
    assert result.status_code == 400 and "does not follow" in result.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n" * 1000, "line 2 is not a resume point"),
        (": point {" + " " * 2000 + "}\n", "line 1 is too long"),
        (": point 0 1 0 " + "A" * 2000 + "\n", "line 1 is too long"),
    ],
)
def test_lines_are_read_one_by_one_up_to_the_first_that_is_wrong(gate: Gate, text: str, message: str) -> None:
    result = send(gate, PATH, BODY, text).result()
    assert result.status_code == 400 and message in result.json()["error"]["message"], result.text


def test_more_ids_than_a_sequence_may_have_are_refused_at_once(gate: Gate) -> None:
    result = send(gate, PATH, BODY, points(2, num_ids=9)).result()
    assert result.status_code == 400 and "more than 8 ids" in result.json()["error"]["message"]
    result = send(gate, PATH, BODY | {"max_tokens": 600}, points(2, num_ids=513)).result()
    assert result.status_code == 400 and "more than 512 ids" in result.json()["error"]["message"]
