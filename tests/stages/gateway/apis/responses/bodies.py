"""Bodies of /v1/responses, and what a gateway answers."""

import json
from typing import Any

from openai.types.responses import Response

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.peers import until

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "Hi"}
FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
BACKGROUND = BODY | {"background": True}
STREAMED = BACKGROUND | {"stream": True}


def reply(gate: Gate, body: Any, text: str = "Hello", finish: m.Finish = m.Finish.STOP) -> Any:
    """The response for which the model generates `text`."""
    future = gate.post(body, PATH)
    submit = gate.begin()
    gate.delta(submit, text, num_ids=4, finish=finish, num_cached=2)
    response = future.result()
    assert response.status_code == 200, response.text
    found = response.json()
    Response.model_validate(found, strict=False)
    return found


def events_of(text: str) -> list[Any]:
    """The events of a stream."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.removeprefix("event: ").partition("\ndata: ")
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def until_ended(gate: Gate, response_id: str) -> Any:
    """Poll a background response."""
    found: Any = {}

    def has_ended() -> bool:
        found.update(gate.client.get(f"{PATH}/{response_id}").json())
        return found["status"] not in ("queued", "in_progress")

    until(has_ended, "the background response ends")
    return found
