"""Streams that are continued behind a resume point: the events are those of an undisturbed stream, each once."""

import json
import re
from typing import Any

import httpx
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.runtime.resume_points import RESUMABLE, RESUME
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PIECES = [
    "Well", ", <think", '>\nso"', "</think>", "<tool", '_call>\n{"name": "add", "arg', 'uments": {"a": 1}}',
    "\n</tool_call>", "",
]  # fmt: skip
"""What the model writes; each piece is an id."""


def points_of(text: str) -> str:
    return "".join(re.findall(r"^: point .*\n", text, re.MULTILINE))


def events_of(text: str) -> list[str]:
    return [re.sub(r"^: point .*\n", "", block, flags=re.MULTILINE) for block in text.split("\n\n") if block.strip()]


def without_points(text: str) -> str:
    return re.sub(r"(?:^: point .*\n)+\n", "", text, flags=re.MULTILINE)


def merged(text: str) -> list[Any]:
    """The events of a stream of chat chunks, with neighbouring pieces of one kind joined: how output is cut into events
    depends on when it arrives."""
    found: list[Any] = []
    for block in without_points(text).split("\n\n"):
        if not block or block == "data: [DONE]":
            continue
        event = json.loads(block.split("data: ", 1)[1])
        (choice,) = event.pop("choices", None) or [event]
        delta = choice.get("delta", {})
        kind = choice.get("index"), *sorted(delta), choice.get("finish_reason")
        piece = delta.get("content") or delta.get("reasoning") or choice.get("text")
        if found and piece and found[-1][0] == kind:
            found[-1][1] += piece
        else:
            found.append([kind, piece or json.dumps(delta), event.get("id"), event.get("created")])
    return found


def send(gate: Gate, path: str, body: dict[str, Any], points: str = "") -> Any:
    content = points.encode() + json.dumps(body).encode()
    headers = {RESUMABLE: "1"} | ({RESUME: str(len(points))} if points else {})
    return gate.do(gate.client.post, path, content=content, headers=headers)


def play(gate: Gate, submit: m.Submit, pieces: list[str], begin: int = 0) -> None:
    """Play the stages: each piece is the text of one id, from `begin` on."""
    gate.accept(submit, tail="")
    if begin:
        gate.continue_at(submit, 0, begin)
        gate.delta(submit, "".join(pieces[:begin]), num_ids=0)
    for piece in pieces[begin:-1]:
        gate.delta(submit, piece)
        gate.rig.load()  # it is written
    gate.finish(submit, pieces[-1])


def whole(gate: Gate, path: str, body: dict[str, Any], pieces: list[str]) -> str:
    response = send(gate, path, body)
    play(gate, gate.submit(), pieces)
    result: httpx.Response = response.result()
    assert result.status_code == 200 and result.headers[RESUMABLE] == "1", result.text
    return result.text


@pytest.fixture(scope="module")
def tools_gate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    chat = ChatSettings(tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    with Gate(tmp_path_factory.mktemp("gate"), chat=chat) as gate:
        yield gate


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "custom", "custom": {"name": "add"}}]}),
    ("/v1/completions", COMPLETION | {"stream_options": {"include_usage": True}}),
    ("/v1/messages", CHAT | {"max_tokens": 100, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}),
]


def test_an_end_without_new_ids_has_a_point_of_its_own(gate: Gate) -> None:
    """A stream that is continued behind it has neither the last text nor the finish event again."""
    body = CHAT | {"stream": True}
    response = send(gate, "/v1/chat/completions", body)
    submit = gate.begin()
    gate.delta(submit, "a")
    gate.rig.load()  # it is written
    gate.delta(submit, "b", num_ids=0, finish=m.Finish.LENGTH)
    text = response.result().text
    received, done = text.split("data: [DONE]")[0], "data: [DONE]\n\n"
    assert re.findall(r"^: point (0 .*) .*\n", text, re.MULTILINE) == ["0 1 0", "0 2 1"]
    response = send(gate, "/v1/chat/completions", body, points_of(received))
    submit = gate.begin()
    gate.continue_at(submit, 0, 1)
    gate.delta(submit, "ab", num_ids=0, finish=m.Finish.LENGTH)
    assert without_points(response.result().text) == done


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_stream_continues_behind_each_of_its_points(tools_gate: Gate, path: str, body: dict[str, Any]) -> None:
    gate = tools_gate
    body = body | {"stream": True}
    undisturbed = whole(gate, path, body, PIECES)
    ends = [match.end() for match in re.finditer(r"^: point .*\n\n", undisturbed, re.MULTILINE)]
    assert len(ends) >= 3
    for end in ends:
        received = undisturbed[:end]
        response = send(gate, path, body, points_of(received))
        submit = gate.submit()
        num_ids = len(bytes(submit.outputs[0])) // 4 if submit.outputs else 0  # type: ignore[arg-type]
        assert submit.options.repeats_received == bool(num_ids)
        if num_ids == len(PIECES):
            gate.accept(submit, tail="")
            gate.continue_at(submit, 0, num_ids)
            gate.delta(submit, "".join(PIECES), num_ids=0, finish=m.Finish.STOP)
        else:
            play(gate, submit, PIECES, num_ids)
        result = response.result()
        assert result.status_code == 200, result.text
        rest = result.text
        assert merged(received + rest) == merged(undisturbed)
        head = json.loads(points_of(undisturbed).split("\n")[0].removeprefix(": point "))
        assert submit.options.seed == head["seed"]


def test_output_that_overtakes_the_repeated_text_is_not_lost(gate: Gate) -> None:
    undisturbed = whole(gate, "/v1/completions", COMPLETION | {"stream": True}, ["a", "b", "c"])
    first = undisturbed[: undisturbed.index("\n\n: point") + 2]
    received = undisturbed[: undisturbed.index("\n\n", len(first)) + 2]
    response = send(gate, "/v1/completions", COMPLETION | {"stream": True}, points_of(received))
    submit = gate.submit()
    num_ids = len(bytes(submit.outputs[0])) // 4  # type: ignore[arg-type]
    gate.accept(submit)
    gate.continue_at(submit, 0, num_ids)
    gate.finish(submit, "abc")  # the repeated text, and new text, in one delta
    texts = [[piece for _, piece, *_ in merged(text)] for text in (received + response.result().text, undisturbed)]
    assert "".join(texts[0]) == "".join(texts[1]) == "abc"


def test_each_of_several_choices_continues(gate: Gate) -> None:
    body = COMPLETION | {"stream": True, "n": 2}
    response = send(gate, "/v1/completions", body)
    submit = gate.begin()
    gate.finish(submit, "long", 0)
    gate.delta(submit, "sh", index=1)
    gate.finish(submit, "ort", 1)
    undisturbed = response.result().text
    points = [line for line in points_of(undisturbed).split("\n") if re.match(r": point (\{|0 4 1|1 2 0)", line)]
    assert len(points) in (2, 3)  # the deltas of one turn make one point
    if len(points) == 2:
        points.append(": point 1 2 0 AAAAAA==")
    response = send(gate, "/v1/completions", body, "\n".join(points) + "\n")
    submit = gate.begin()
    gate.continue_at(submit, 0, 1, 0)
    gate.delta(submit, "long", 0, index=0, finish=m.Finish.STOP)
    gate.continue_at(submit, 0, 1, 1)
    gate.delta(submit, "sh", 0, index=1)
    gate.finish(submit, "ort", 1)
    (event,) = [json.loads(one.split("data: ")[1]) for one in events_of(response.result().text) if "choices" in one]
    assert event["choices"][0]["text"] == "ort" and event["choices"][0]["index"] == 1


def test_a_prompt_that_has_changed_is_refused(gate: Gate) -> None:
    undisturbed = whole(gate, "/v1/completions", COMPLETION | {"stream": True}, ["a", "b"])
    response = send(gate, "/v1/completions", COMPLETION | {"stream": True}, points_of(undisturbed))
    gate.accept(gate.submit(), num_ids=4)
    assert response.result().status_code == 400
    assert response.result().json()["error"]["code"] == "prompt_changed"


HEAD = ': point {"id":"cmpl-1","created":1,"arrival_s":1.0,"seed":1,"salt":0,"prompt":"0123456789abcdef"}\n'


@pytest.mark.parametrize(
    ("change", "points", "message"),
    [
        ({}, "nothing\n", "line 1"),
        ({}, HEAD + ": point 1 0 0 AAAAAA==\n", "line 2"),
        ({}, HEAD + ": point 0 0 0 AAAA\n", "line 2"),
        ({}, ": point 0 1 0 AAAAAA==\n", "line 1"),
        ({}, ': point {"id":"cmpl-1"}\n', "first point"),
        ({}, "\n", "missing"),
        ({"echo": True}, HEAD, "no resume points"),
        ({"n": 2, "logprobs": 1}, HEAD, "no resume points"),
        ({"prompt": ["a", "b"]}, HEAD, "no resume points"),
    ],
)
def test_points_are_checked(gate: Gate, change: dict[str, Any], points: str, message: str) -> None:
    result = send(gate, "/v1/completions", COMPLETION | {"stream": True} | change, points).result()
    assert result.status_code == 400
    assert message in result.json()["error"]["message"] and result.json()["error"]["param"] == RESUME


def test_the_number_of_bytes_is_checked(gate: Gate) -> None:
    for value in ("x", "-1", "0", "99999999999", "1" * 5000):
        result = gate.client.post("/v1/completions", json=COMPLETION, headers={RESUME: value})
        assert result.status_code == 400 and result.json()["error"]["param"] == RESUME


def test_a_failure_is_announced(gate: Gate) -> None:
    response = send(gate, "/v1/completions", COMPLETION | {"stream": True})
    submit = gate.begin()
    gate.delta(submit, "a")
    gate.rig.load()
    gate.delta(submit, finish=m.Finish.ERROR, error="no more")
    text = response.result().text
    assert re.search(r'\n\n: point failed \w+\n\ndata: \{"error":', text)


def test_streams_without_the_header_have_no_points(gate: Gate) -> None:
    response = gate.complete(COMPLETION | {"stream": True})
    gate.serve("a")
    assert ": point" not in response.result().text and RESUMABLE not in response.result().headers
