"""Anthropic's own tools in bodies of /v1/messages: the client's become functions, and the server's are left out."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import anthropic.types.beta as theirs
import jsonschema
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.known_tools import KNOWN, is_left_out
from pipeline.stages.gateway.parsing.parsed_request import MAX_SHOWN_TYPES, MAX_TYPE_CHARS
from tests.logs import lines_of
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.parsing.test_anthropic import NOW, parse, prompt_of, refused, says, text

USER = {"role": "user", "content": "Hi"}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
BASH = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9000}
SERVER_USE = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [{"type": "web_search_result", "url": "https://example.org", "title": "a", "encrypted_content": "x"}],
}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"


def claude_code(**fields: Any) -> dict[str, Any]:
    """A request as Claude Code 2.1.197 makes it, with shorter texts and fewer tools."""
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    user = {"device_id": "7aa25f", "account_uuid": "", "session_id": "0f1d1637-980a-4877-aa6c-3c5477209524"}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "additionalProperties": False,
    }
    return {
        "model": MODEL,
        "messages": [
            says("user", {"type": "text", "text": "<system-reminder>\n"}, {"type": "text", "text": "Hi"} | ephemeral),
            {"role": "system", "content": "Available agent types for the Agent tool:"},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0df; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are a Claude agent, built on Anthropic's Claude Agent SDK."} | ephemeral,
            {"type": "text", "text": "\nYou are an interactive agent."} | ephemeral,
        ],
        "tools": [
            {
                "name": name,
                "description": "It does.",
                "input_schema": schema | {"properties": {"a": {"type": "string"}}},
            }
            for name in ("Agent", "Bash", "WebSearch")
        ],
        "metadata": {"user_id": json.dumps(user)},
        "max_tokens": 64,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    } | fields


def functions(found: m.ChatPrompt) -> dict[str, Any]:
    return {one["function"]["name"]: one["function"] for one in json.loads(found.tools or "[]")}


def tags(union: Any) -> set[str]:
    """The types of the members of one of the package's unions."""
    found = (get_args(get_type_hints(one)["type"]) for one in get_args(union) if hasattr(one, "__total__"))
    return {one for each in found for one in each if isinstance(one, str)}


TYPES = sorted(tags(theirs.BetaToolUnionParam))
CLIENT_FAMILIES = ("bash_", "text_editor_", "memory_", "computer_2")


def test_the_package_has_types() -> None:
    assert {"web_search_20250305", "mcp_toolset", "computer_toolset_20260801", *KNOWN} <= set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_each_of_anthropic_s_tools_is_a_function_or_left_out(kind: str) -> None:
    found = parse(tools=[{"type": kind, "name": "theirs"}, NOW])
    (chat,) = found.prompts
    assert isinstance(chat, m.ChatPrompt)
    is_own = kind.startswith(CLIENT_FAMILIES)
    assert list(functions(chat)) == (["theirs", "now"] if is_own else ["now"])
    assert found.left_out == ([] if is_own else [kind])
    assert is_left_out(kind) is not is_own


def test_a_later_type_is_left_out_and_other_words_are_refused() -> None:
    assert parse(tools=[{"type": "web_search_20301231", "name": "web_search"}]).left_out == ["web_search_20301231"]
    for kind in ("function", "web_search", "web_search_2025", ""):
        assert refused(tools=[{"type": kind, "name": "f", "input_schema": {}}]).param == "tools[0].type"


INPUTS: list[tuple[str, dict[str, Any]]] = [
    ("bash_20250124", {"command": "ls"}),
    ("bash_20250124", {"restart": True}),
    ("text_editor_20250124", {"command": "undo_edit", "path": "/a"}),
    ("text_editor_20250429", {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"}),
    ("text_editor_20250728", {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"}),
    ("text_editor_20250728", {"command": "view", "path": "/a", "view_range": [1, -1]}),
    ("computer_20241022", {"action": "cursor_position"}),
    ("computer_20250124", {"action": "scroll", "coordinate": [1, 2], "scroll_direction": "up", "scroll_amount": 3}),
    ("memory_20250818", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
]
BAD_INPUTS: list[tuple[str, dict[str, Any]]] = [
    ("text_editor_20250728", {"command": "undo_edit", "path": "/a"}),
    ("computer_20241022", {"action": "scroll"}),
    ("computer_20251124", {"action": "zoom", "region": [0, 0, 1, 1]}),
    ("memory_20250818", {"path": "/memories"}),
]


@pytest.mark.parametrize(("kind", "value"), INPUTS)
def test_schemas_take_the_tools_inputs(kind: str, value: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(
        functions(prompt_of(USER, tools=[{"type": kind, "name": "f"}]))["f"]["parameters"]
    ).validate(value)


@pytest.mark.parametrize(("kind", "value"), BAD_INPUTS)
def test_schemas_refuse_other_inputs(kind: str, value: dict[str, Any]) -> None:
    schema = functions(prompt_of(USER, tools=[{"type": kind, "name": "f"}]))["f"]["parameters"]
    assert not jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("name", ["View", "Create", "StrReplace", "Insert", "Delete", "Rename"])
def test_the_memory_tool_has_the_arguments_that_the_package_reads(name: str) -> None:
    command = getattr(theirs, f"BetaMemoryTool20250818{name}Command")
    schema = functions(prompt_of(USER, tools=[{"type": "memory_20250818", "name": "memory"}]))["memory"]["parameters"]
    assert set(command.model_fields) <= set(schema["properties"])
    assert get_args(command.model_fields["command"].annotation)[0] in schema["properties"]["command"]["enum"]


def test_the_model_sees_the_size_of_the_screen() -> None:
    computer = {"type": "computer_20251124", "name": "computer", "display_width_px": 1024, "display_height_px": 768}
    found = functions(prompt_of(USER, tools=[computer | {"enable_zoom": True}]))["computer"]
    assert found["description"].endswith("The screen has 1024 x 768 pixels.")
    assert "zoom" in found["parameters"]["properties"]["action"]["enum"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEB], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [WEB], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEB, BASH, BASH]}, "tools[2].name"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [WEB] * 129}, "tools"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_tool_that_the_client_runs_may_be_required() -> None:
    found = parse(tools=[WEB, EDITOR, BASH], tool_choice={"type": "tool", "name": "bash"})
    assert found.options.grammar is not None
    assert found.options.grammar.param == "tools[2].input_schema"
    assert "only Anthropic runs" in refused(tools=[WEB], tool_choice={"type": "tool", "name": "web_search"}).message


def test_what_is_left_out_is_bounded() -> None:
    many = [{"type": f"{'a' * 5000}_{20250000 + index}", "name": "x"} for index in range(100)]
    found = parse(tools=many).left_out
    assert len(found) <= MAX_SHOWN_TYPES and max(map(len, found)) <= MAX_TYPE_CHARS


# ------------------------------------------------------------------------------------------------------------- history

REFUSED_BLOCKS = {
    "compaction",
    "container_upload",
    "document",
    "fallback",
    "image",
    "search_result",
    "tool_addition",
    "tool_removal",
}
"""They are input, or change the prompt."""
MEDIA = {"document", "image", "search_result"}
OWN_BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}


@pytest.mark.parametrize("kind", sorted(tags(theirs.BetaContentBlockParam) - OWN_BLOCKS))
def test_blocks_of_tools_that_anthropic_ran_are_ignored(kind: str) -> None:
    message = says("assistant", text("a"), {"type": kind, "content": [], "tool_use_id": "x"}, text("b"))
    if kind in REFUSED_BLOCKS:
        param = "messages[1].content[1]" + ("" if kind in MEDIA else ".type")
        assert refused(messages=[USER, message, USER]).param == param
        return
    said = prompt_of(USER, message, USER).messages[1]
    assert (said.role, said.content, said.tool_calls) == ("assistant", "ab", [])
    assert refused(messages=[says("user", {"type": kind})]).param == "messages[0].content[0].type"


def test_a_turn_with_a_search_is_its_text() -> None:
    said = prompt_of(USER, says("assistant", SERVER_USE, FOUND, text("It is a.")), USER).messages[1]
    assert said.content == "It is a."
    alone = prompt_of(USER, says("assistant", SERVER_USE, FOUND), USER).messages
    assert [(one.role, one.content) for one in alone] == [("user", "Hi"), ("assistant", ""), ("user", "Hi")]


def test_results_may_name_tools() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    found = {"type": "tool_reference", "tool_name": "find"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found, text("a")]}
    *_, reported = prompt_of(USER, says("assistant", use), says("user", result)).messages
    assert reported.parts == ["find", "a"]


# --------------------------------------------------------------------------------------------------------- Claude Code


def test_a_request_of_claude_code() -> None:
    found = parse(**claude_code(model="tiny"))
    (chat,) = found.prompts
    assert isinstance(chat, m.ChatPrompt)
    assert [one.role for one in chat.messages] == ["system", "user", "system"]
    assert list(functions(chat)) == ["Agent", "Bash", "WebSearch"] and not found.left_out


def test_claude_code_s_request_is_answered_and_the_log_says_what_was_left_out(tmp_path: Path) -> None:
    headers = {"anthropic-beta": BETAS, "anthropic-version": "2023-06-01", "x-app": "cli"}
    chat = ChatSettings(tool_call_parser="hermes", reasoning_parser="none")
    with lines_of("left out tools that only their provider runs") as lines, Gate(tmp_path, chat=chat) as gate:
        body = claude_code(
            tools=[*claude_code()["tools"], WEB, BASH], container="c", service_tier="auto", mcp_servers=[]
        )
        response = gate.do(gate.client.post, "/v1/messages?beta=true", json=body, headers=headers)
        gate.delta(gate.begin(), "Hi!", finish=m.Finish.STOP)
        assert response.result().status_code == 200 and '"text":"Hi!"' in response.result().text
    assert [(line["num"], line["types"]) for line in lines] == [(1, "web_search_20250305")]
