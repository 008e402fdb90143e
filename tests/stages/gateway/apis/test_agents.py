"""Requests of coding agents as they sent them to a server: the first one, and one that has a tool's result. Texts are
cut, ids and limits of tokens replaced (tests/data/agents.json)."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import Gate

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parents[3] / "data" / "agents.json").read_text("utf-8"))
ARGUMENTS = '{"command": "python a.py"}'
ENDS = {"/v1/chat/completions": "[DONE]", "/v1/messages": "message_stop", "/v1/responses": "response.completed"}


def name_of(tool: dict[str, Any]) -> str:
    found: str = tool.get("function", tool)["name"]
    return found


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: f"{one['client']}, turn {one['turn']}")
def test_the_requests_of_agents_get_text_and_calls(one: dict[str, Any], tmp_path: Path) -> None:
    body, path = one["body"], one["path"].partition("?")[0]
    functions = [name_of(tool) for tool in body.get("tools", ()) if tool.get("type", "function") == "function"]
    call = f'<tool_call>{{"name": "{functions[0]}", "arguments": {ARGUMENTS}}}</tool_call>' if functions else ""
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="none")) as gate:
        streamed = gate.do(gate.client.post, one["path"], json=body, headers=one["headers"])
        submit = gate.begin()
        prompt = submit.prompt
        assert isinstance(prompt, m.ChatPrompt)
        gate.delta(submit, "I run it." + call, finish=m.Finish.STOP)
        response = streamed.result()
    assert response.status_code == 200, response.text
    assert body["stream"] and "I run it." in response.text and ENDS[path] in response.text
    if functions:
        offered = [tool["function"]["name"] for tool in json.loads(prompt.tools)]
        assert set(functions) <= set(offered)
        assert functions[0] in response.text and "python a.py" in response.text
    if one["turn"] == 2:
        assert any(message.role == "tool" for message in prompt.messages)
    provided = sorted({tool["type"] for tool in body.get("tools", ()) if tool.get("type") == "web_search"})
    assert response.headers.get("Warning", "").endswith(f'left out: {", ".join(provided)}"') == bool(provided)
