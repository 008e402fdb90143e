"""Choices among tools in bodies of POST /v1/responses, and items of tools that only OpenAI runs."""

import json
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseInputItemParam
from openai.types.responses.tool_choice_allowed import ToolChoiceAllowed

from pipeline.stages.gateway.apis.responses.items import LEFT_OUT_ITEMS
from pipeline.stages.gateway.errors import ApiError
from tests.stages.gateway.apis.responses.parsed import CALL, FIND, OUTPUT, WEB, parsed, prompt, reply_fields, request
from tests.stages.gateway.apis.responses.test_tools import MCP, PATCH, functions

TOOLS = [WEB, PATCH, MCP, FIND]


def allowed(*tools: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        request(**fields)
    return error.value


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([{"type": "function", "name": "find"}], ["find"]),
        ([{"type": "function", "name": "find"}, {"type": "custom", "name": "apply_patch"}], ["apply_patch", "find"]),
        ([{"type": "web_search"}, {"type": "function", "name": "search"}], ["mcp__docs__search"]),
        ([{"type": "namespace", "name": "mcp__docs"}], ["mcp__docs__search", "mcp__docs__now"]),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_gets_the_tools_that_are_allowed(tools: list[dict[str, Any]], names: list[str], mode: str) -> None:
    found = prompt(tools=TOOLS, tool_choice=allowed(*tools, mode=mode))
    assert list(functions(found)) == names
    assert found.tool_choice == mode


def test_a_choice_of_none_of_the_tools() -> None:
    assert prompt(tools=TOOLS, tool_choice=allowed({"type": "web_search"})).tools == ""
    assert prompt(tools=TOOLS, tool_choice=allowed()).tools == ""
    assert refused(tools=TOOLS, tool_choice=allowed({"type": "web_search"}, mode="required")).param == "tool_choice"


def test_the_response_repeats_the_choice_and_all_tools() -> None:
    choice = allowed({"type": "function", "name": "find"}, {"type": "web_search"})
    found = reply_fields(tools=TOOLS, tool_choice=choice)
    assert json.loads(found.tool_choice) == choice
    assert ToolChoiceAllowed.model_validate_json(found.tool_choice).to_dict() == choice
    assert json.loads(found.tools) == [PATCH, MCP, FIND]


def test_errors_of_the_grammar_name_the_place_in_the_body() -> None:
    bad = FIND | {"parameters": {"type": "string"}}
    choice = allowed({"type": "function", "name": "find"})
    assert refused(tools=[WEB, PATCH, bad], tool_choice=choice).param == "tools[2].parameters.type"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed({"type": "function", "name": "x"}), "tool_choice.tools[0]"),
        (allowed({"type": "custom", "name": "find"}), "tool_choice.tools[0]"),
        (allowed({"type": "function", "name": "find"}, {"type": "image_generation"}), "tool_choice.tools[1]"),
        (allowed({"type": "namespace", "name": "crm"}), "tool_choice.tools[0]"),
        (allowed(mode="none"), "tool_choice.mode"),
        ({"type": "allowed_tools", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "find"}]}, "tool_choice.tools[0].type"),
    ],
)
def test_refusals_of_choices_name_the_field(choice: dict[str, Any], param: str) -> None:
    assert refused(tools=TOOLS, tool_choice=choice).param == param


# ------------------------------------------------------------------------------------------------------------- history

OWN = {
    "custom_tool_call",
    "custom_tool_call_output",
    "function_call",
    "function_call_output",
    "item_reference",
    "message",
    "reasoning",
}
REFUSED = {
    "additional_tools",
    "compaction",
    "compaction_trigger",
    "configuration_update",
    "program",
    "program_output",
}
"""They stand for more than a tool's call."""
KINDS = sorted(
    {
        str(kind)
        for item in get_args(ResponseInputItemParam)
        for one in get_args(get_type_hints(item)["type"])
        for kind in (get_args(one) or (one,))
        if isinstance(kind, str)
    }
)
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_openai_s_items_is_known(kind: str) -> None:
    assert (kind in OWN) + (kind in REFUSED) + (kind in LEFT_OUT_ITEMS) == 1, "decide what it becomes"


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="},
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "c9", "status": "completed", "action": {"type": "exec"}},
    {"type": "local_shell_call_output", "id": "lsh_1", "output": "a"},
    {"type": "shell_call_output", "call_id": "c8", "output": [{"stdout": "a", "stderr": "", "outcome": {}}]},
    {"type": "computer_call_output", "call_id": "c7", "output": {"type": "computer_screenshot", "image_url": "x"}},
    {"type": "tool_search_call", "call_id": "c6", "execution": "client", "arguments": {"query": "a"}, "status": None},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "a", "name": "f", "arguments": "{}", "output": None},
]


@pytest.mark.parametrize("item", HOSTED, ids=lambda item: item["type"])
def test_items_of_tools_that_openai_ran_are_left_out(item: dict[str, Any]) -> None:
    with_it, without = (
        [USER, CALL, *more, OUTPUT, {"role": "assistant", "content": "a"}, USER] for more in ([item], [])
    )
    assert prompt(input=with_it).messages == prompt(input=without).messages
    assert len(parsed(input=with_it).items) == len(without)
    assert prompt(input=[item], previous_response_id="resp_1").messages


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_items_that_stand_for_more_are_refused(kind: str) -> None:
    assert refused(input=[USER, {"type": kind}]).param == "input[1].type"


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_verbosity_is_repeated(verbosity: str) -> None:
    assert json.loads(reply_fields(text={"verbosity": verbosity}).text)["verbosity"] == verbosity
