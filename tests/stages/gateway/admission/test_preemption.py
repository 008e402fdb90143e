"""Output that grows beyond gateway.max_open_bytes: the largest requests wait, and no client loses anything."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_dtype
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of
from tests.stages.gateway.peers import RawPeer

NUM_TOP = 20
STEP = 8
"""Ids of a delta."""
STEP_BYTES = 28_000
"""About what a delta with top logprobs adds to the reply that will be sent as a whole."""
WHOLE = COMPLETION | {"logprobs": NUM_TOP, "max_tokens": 180}
STREAM = WHOLE | {"stream": True}
MAX_BYTES = 2**20
PIECES = [b"t"] * (1 + NUM_TOP)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, max_open_bytes=MAX_BYTES) as gate:
        yield gate


def grow(
    gate: Gate, submit: m.Submit, num_steps: int, finish: m.Finish = m.Finish.NONE, text: str = "t" * STEP
) -> None:
    """Output with top logprobs."""
    token_outputs = np.zeros(STEP, logprob_dtype(NUM_TOP))
    for step in range(num_steps):
        is_last = step == num_steps - 1
        gate.delta(
            submit,
            text,
            STEP,
            token_outputs=token_outputs.tobytes(),
            pieces=PIECES * STEP,
            finish=finish if is_last else m.Finish.NONE,
        )


def end(gate: Gate, submit: m.Submit, finish: m.Finish = m.Finish.LENGTH) -> None:
    """The last output."""
    if submit.options.num_logprobs > 0:
        grow(gate, submit, 1, finish)
    else:
        gate.finish(submit, finish=finish)


def load(gate: Gate) -> dict[str, int]:
    gate.rig.load()
    found: dict[str, int] = gate.client.get("/load").json()
    return found


def until(gate: Gate, condition: Any) -> None:
    """Wait for a condition of /load."""
    end = time.monotonic() + PATIENCE_S
    while not condition(found := load(gate)):
        assert time.monotonic() < end, found


def grow_beyond(gate: Gate, submit: m.Submit) -> None:
    """Grow a request until one is preempted."""
    for _ in range(60):
        grow(gate, submit, 1)
        gate.rig.load()
        if not gate.rig.nothing("schedule", 0.0):
            return
    raise AssertionError("no request was preempted")


def test_the_larger_of_two_waits_and_both_replies_are_complete(gate: Gate) -> None:
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    second = gate.complete(WHOLE | {"seed": 7})
    victim = gate.begin()
    grow(gate, oldest, 3)
    grow_beyond(gate, victim)
    assert gate.closed() == (victim.request_id, 1), "schedule forgets it"
    assert load(gate)["open_bytes"] < MAX_BYTES
    grow(gate, victim, 1)  # was on its way, and is not counted
    assert gate.rig.nothing("ingest", 0.05), "it came back before there was room"
    grow(gate, oldest, 9, m.Finish.LENGTH)
    assert first.result().json()["usage"]["completion_tokens"] == 12 * STEP
    again = gate.submit()
    assert (again.request_id, again.attempt, again.options.seed) == (victim.request_id, 2, 7)
    assert again.prompt == m.IdsPrompt(np.arange(3, dtype=np.int32).tobytes()), "it is not tokenized again"
    assert not any(again.outputs), "its client has nothing yet"
    gate.continue_at(again, 0, 0)
    gate.accept(again)
    grow(gate, again, 12, m.Finish.LENGTH)
    reply = second.result().json()
    assert reply["choices"][0]["text"] == "t" * 12 * STEP
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 12 * STEP
    assert reply["usage"]["completion_tokens"] == 12 * STEP
    until(gate, lambda found: found["open_bytes"] == 0)


def test_a_stream_goes_on_where_it_was(gate: Gate) -> None:
    """Each id and character is sent once."""
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    second = gate.complete(STREAM)
    victim = gate.begin()
    for _ in range(22):  # what a stream has sent is kept by schedule only
        grow(gate, victim, 10)
        gate.rig.load()
    grow(gate, oldest, 22)
    assert gate.closed() == (victim.request_id, 1)
    end(gate, oldest)
    assert first.result().status_code == 200
    again = gate.submit()
    assert again.attempt == 2
    assert [len(bytes(ids)) // 4 for ids in again.outputs] == [220 * STEP]  # type: ignore[arg-type]
    grow(gate, again, 2, m.Finish.LENGTH)
    choices = [choice for event in events_of(second.result().text) for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "t" * 222 * STEP
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 222 * STEP
    until(gate, lambda found: found["open_bytes"] == 0)


def test_requests_of_several_prompts_end_one_after_the_other(gate: Gate) -> None:
    """Prompts that are complete keep their output until their request is: the oldest request must go on."""
    body = WHOLE | {"prompt": ["a", "b"], "max_tokens": 80}
    first = gate.complete(body)
    oldest = [gate.begin(), gate.begin()]
    second = gate.complete(body)
    other = [gate.begin(), gate.begin()]
    for submit in (oldest[0], other[0]):
        grow(gate, submit, 10, m.Finish.LENGTH)
        assert gate.closed() == (submit.request_id, 1)
    gate.delta(other[1], "t", 1, token_outputs=np.zeros(1, logprob_dtype(NUM_TOP)).tobytes(), pieces=PIECES)
    grow_beyond(gate, oldest[1])
    assert gate.closed() == (other[1].request_id, 1), "the other gives way"
    grow(gate, oldest[1], 1)
    assert load(gate)["open_bytes"] > MAX_BYTES
    assert gate.rig.nothing("schedule", 0.05), "nothing else can give way"
    end(gate, oldest[1])
    assert len(first.result().json()["choices"]) == 2
    again = gate.submit()
    assert (again.request_id, again.attempt) == (other[1].request_id, 2)
    gate.continue_at(again, 0, 0)
    grow(gate, again, 10, m.Finish.LENGTH)
    assert [one["text"] for one in second.result().json()["choices"]] == ["t" * 80] * 2
    until(gate, lambda found: found["open_bytes"] == 0)


def test_the_prompt_stands_before_output_that_is_generated_again(gate: Gate) -> None:
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    second = gate.complete(COMPLETION | {"echo": True, "prompt": "Once", "max_tokens": 20000})
    victim = gate.begin()
    gate.delta(victim, "x" * 100_000, STEP)
    grow_beyond(gate, oldest)
    assert gate.closed() == (victim.request_id, 1)
    end(gate, oldest)
    assert first.result().status_code == 200
    again = gate.submit()
    gate.continue_at(again, 0, 0)
    gate.delta(again, " upon", 1)
    gate.finish(again, "!")
    assert second.result().json()["choices"][0]["text"] == "Once upon!"


def test_room_of_a_reply_that_ends_in_the_same_wake_is_used(gate: Gate) -> None:
    """Its client takes it at once: the oldest request need not give way to it."""
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    second = gate.complete(COMPLETION)
    other = gate.begin()
    num_chars = 12_000
    gate.delta(other, "x" * num_chars)
    num_steps = 0
    while load(gate)["open_bytes"] < MAX_BYTES - 2 * STEP_BYTES:
        grow(gate, oldest, 1)
        num_steps += 1
    token_outputs = np.zeros(2 * STEP, logprob_dtype(NUM_TOP)).tobytes()
    ids = np.arange(1 + 2 * STEP, dtype=np.int32).tobytes()
    gate.rig.send(
        m.Deltas(
            [other.request_id, oldest.request_id],
            [1, 1],
            [0, 0],
            ["", "t" * 2 * STEP],
            [num_chars, STEP * num_steps],
            ids,
            [1, STEP * num_steps],
            [1, 2 * STEP],
            [int(m.Finish.STOP), int(m.Finish.NONE)],
            [None, None],
            token_outputs=[b"", token_outputs],
            pieces=[[], PIECES * 2 * STEP],
        ),
        "detokenize.0",
    )
    gate.continue_at(oldest, STEP * (num_steps + 2), STEP * (num_steps + 2))
    assert len(second.result().json()["choices"][0]["text"]) == num_chars
    assert gate.closed() == (other.request_id, 1)
    used = load(gate)["open_bytes"]
    assert gate.rig.nothing("schedule", 0.05), "the oldest was preempted"
    assert used <= MAX_BYTES < used + 5 * num_chars, "the limit was not reached"
    end(gate, oldest)
    assert gate.closed() == (oldest.request_id, 1)
    assert len(first.result().json()["choices"][0]["text"]) == STEP * (num_steps + 3)


def test_a_small_request_beside_large_ones_is_not_preempted(gate: Gate) -> None:
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    small = gate.complete(COMPLETION)
    normal = gate.begin()
    second = gate.complete(WHOLE)
    victim = gate.begin()
    gate.delta(normal, "word ")
    grow(gate, oldest, 3)
    grow_beyond(gate, victim)
    assert gate.closed() == (victim.request_id, 1)
    gate.finish(normal, "end")
    assert small.result().json()["choices"][0]["text"] == "word end"
    end(gate, oldest)
    assert first.result().status_code == 200
    again = gate.submit()
    gate.continue_at(again, 0, 0)
    end(gate, again)
    assert second.result().status_code == 200


@pytest.mark.parametrize("how", ["client leaves", "aborted", "schedule dies", "detokenize dies", "ingest dies"])
def test_a_request_that_waits_can_end_and_survives_the_stages(gate: Gate, how: str) -> None:
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    connection = gate.raw(STREAM | {"stream": False, "request_id": "mine"}, "/v1/completions")
    victim = gate.begin()
    grow(gate, oldest, 3)
    grow_beyond(gate, victim)
    assert gate.closed()[0] == victim.request_id
    if how == "client leaves":
        connection.close()
        until(gate, lambda found: found["open_sequences"] == 1)
    elif how == "aborted":
        gate.client.post("/abort_requests", json={"request_ids": ["mine"]})
        assert b'"finish_reason":"abort"' in connection.recv(1 << 20)
        until(gate, lambda found: found["open_sequences"] == 1)
    else:
        gate.rig.restart(how.split()[0] + ".0")
        if how == "schedule dies":
            assert gate.submit().request_id == oldest.request_id, "only what schedule had"
            oldest = m.Submit(oldest.request_id, 2, 0, 0.0, oldest.prompt, oldest.options)
        assert gate.rig.nothing("ingest", 0.05)
    grow(gate, oldest, 1, m.Finish.LENGTH)
    assert first.result().status_code == 200
    if how.endswith("dies"):
        again = gate.submit()
        assert (again.request_id, again.attempt) == (victim.request_id, 2)
        gate.continue_at(again, 0, 0)
        grow(gate, again, 1, m.Finish.LENGTH)
        assert b'"usage"' in connection.recv(1 << 20)
    connection.close()
    until(gate, lambda found: found["open_bytes"] == 0 and found["open_sequences"] == 0)


def test_new_requests_get_503_while_the_limit_is_reached(gate: Gate) -> None:
    response = gate.complete(WHOLE)
    submit = gate.begin()
    grow(gate, submit, 12)
    used = load(gate)["open_bytes"]
    refused = gate.complete(COMPLETION | {"prompt": "x" * (MAX_BYTES - used)}).result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert f"of {MAX_BYTES} bytes are free for new requests" in refused.json()["error"]["message"]
    assert int(refused.headers["Retry-After"]) >= 1
    assert gate.client.post("/v1/completions", content=b"{" + b" " * MAX_BYTES).status_code == 503, "before it is read"
    end(gate, submit)
    assert response.result().status_code == 200
    assert gate.client.post("/v1/completions", content=b"{" + b" " * MAX_BYTES).status_code == 400


def test_clients_over_zmq_get_a_time_to_wait_for(gate: Gate) -> None:
    """`LLM` and `AsyncLLM` wait after `overloaded`, as for sequences."""
    with RawPeer(gate) as peer:
        peer.generate(1, "x" * (MAX_BYTES // 10))
        gate.submit()
        peer.generate(2, "x" * (MAX_BYTES // 10))
        failure = peer.receive(p.Failed).failure
        assert (failure.status, failure.code) == (503, "overloaded")
        assert failure.retry_after_s is not None and "gateway.max_open_bytes" in failure.message
        peer.generate(3)
        assert gate.submit().prompt == m.TextPrompt("Hi")


def test_a_request_that_can_never_fit_gets_400_with_the_fields_to_lower(gate: Gate) -> None:
    def error(body: Any, path: str = "/v1/completions") -> Any:
        response = gate.client.post(path, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "request_too_large"
        return response.json()["error"]

    assert "lower prompt" in error(COMPLETION | {"prompt": "x" * MAX_BYTES})["message"]
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * MAX_BYTES}}]
    found = error(CHAT | {"tools": tools, "tool_choice": "required"}, "/v1/chat/completions")
    assert found["param"] == "messages" and "tools" in found["message"]
    found = error(WHOLE | {"n": 8})
    assert found["param"] == "max_tokens"
    assert "gateway.max_open_bytes" in found["message"] and "lower n, max_tokens, logprobs" in found["message"]
    top = {"logprobs": True, "top_logprobs": NUM_TOP}
    gate.post(CHAT | top | {"n": 8})  # a default never makes a request invalid
    submit = gate.begin()
    assert submit.options.max_tokens is not None and 5 < submit.options.max_tokens < 100
    assert submit.prompt_options.lowers_max_tokens

    gate.reject(submit, m.Failure(400, "no"))


def test_what_resumes_together_fits_together(gate: Gate) -> None:
    """Of two that wait, the second has room alone, but not beside the first."""
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    replies, victims = [], []
    grow(gate, oldest, 12)
    for _ in range(2):
        replies.append(gate.complete(WHOLE))
        victims.append(gate.begin())
        grow_beyond(gate, victims[-1])
        assert gate.closed() == (victims[-1].request_id, 1)
    end(gate, oldest)
    assert first.result().status_code == 200
    for victim, reply in zip(victims, replies, strict=True):
        again = gate.submit()
        assert (again.request_id, again.attempt) == (victim.request_id, 2)
        gate.continue_at(again, 0, 0)
        gate.accept(again)
        grow(gate, again, 1)
        gate.rig.load()
        assert gate.rig.nothing("ingest", 0.05), "both came back"
        end(gate, again)
        assert reply.result().status_code == 200
    until(gate, lambda found: found["open_bytes"] == 0)


@pytest.mark.parametrize("is_complete", [True, False])
def test_logprobs_of_the_prompt_are_there_once(gate: Gate, is_complete: bool) -> None:
    """They come with the first sequence. If that is complete, they do not come again; else all of them do."""
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    second = gate.complete(COMPLETION | {"n": 2, "prompt_logprobs": 1, "max_tokens": 2000})
    victim = gate.submit()
    gate.accept(victim, pieces=[b"a", b"b", b"c"])
    scores = np.zeros(2, logprob_dtype(1))
    scores["logprob"] = [-3.0, -2.0]
    prompt = 0, scores.tobytes(), [b"x", b"y"]
    gate.delta(victim, "one", 1, prompt=prompt, finish=m.Finish.STOP if is_complete else m.Finish.NONE)
    gate.delta(victim, "x" * 100_000, STEP, index=1)
    grow_beyond(gate, oldest)
    assert gate.closed() == (victim.request_id, 1)
    end(gate, oldest)
    assert first.result().status_code == 200
    again = gate.submit()
    assert [bool(ids) for ids in again.outputs] == ([True, False] if is_complete else [])
    gate.continue_at(again, 0, 0, index=1)
    if not is_complete:
        gate.continue_at(again, 0, 0)
        gate.delta(again, "one", 1, prompt=prompt, finish=m.Finish.STOP)
    gate.finish(again, "two", index=1)
    choices = second.result().json()["choices"]
    assert [choice["text"] for choice in choices] == ["one", "two"]
    for choice in choices:
        found = [one and [entry["logprob"] for entry in one.values()] for one in choice["prompt_logprobs"]]
        assert [one and one[0] for one in found] == [None, -3.0, -2.0]
