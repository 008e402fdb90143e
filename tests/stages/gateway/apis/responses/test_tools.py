"""Tools of POST /v1/responses, as Codex sends them: each becomes a function of the chat, or is left out."""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseCustomToolCall

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.responses.body import FunctionChoice, ResponseTool
from pipeline.stages.gateway.apis.responses.parsing import ParsedResponse, parse_response
from pipeline.stages.gateway.apis.responses.reply import reply_fields_of
from pipeline.stages.gateway.apis.responses.tools import ChatTools, chat_name
from pipeline.stages.gateway.parsing.chat.custom_tools import arguments_of, input_of
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from tests.logs import lines_of
from tests.stages.gateway.apis.responses.bodies import events_of as stream_of
from tests.stages.gateway.apis.responses.parsed import FIND, NOW, WEB, Stored, prompt, reply_fields
from tests.stages.gateway.apis.responses.test_output import OutputBuilder, arguments, call, events_of, names
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.replies.dialects import DIALECTS, kept
from tools.scaling_meter.bodies import a_namespace

FORMATS = ChatFormats.of("", ChatSettings(tool_call_parser="hermes", reasoning_parser="none"))
GRAMMAR = 'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?'
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files. This is a FREEFORM tool.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
SEARCH = {"type": "function", "name": "search", "description": "It searches.", "strict": False}
MCP = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Tools in the mcp__docs namespace.",
    "tools": [SEARCH | {"parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}, NOW],
}
LEFT_OUT: list[dict[str, Any]] = [
    WEB,
    {"type": "web_search_preview_2025_03_11", "search_context_size": "low"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "# Tool discovery", "parameters": {"type": "object"}},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "mcp", "server_label": "docs", "server_url": "https://example.org", "require_approval": "never"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "browser"},
]
SHELL = {
    "type": "function",
    "name": "shell_command",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout_ms": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def codex(*more: dict[str, Any]) -> dict[str, Any]:
    """A request as Codex 0.171.0 makes it, with shorter texts and fewer functions, and with the items of later turns.
    `apply_patch` is one of its custom tools."""
    return {
        "model": "tiny",
        "input": [
            message("developer", "You are a coding agent.") | {"id": "msg_a9e389d9-e35c-5391-9045-9b5778eb6f64"},
            message("developer", "<permissions instructions>Filesystem sandboxing</permissions instructions>"),
            message("user", "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"),
            message("user", "Fix the test."),
            *more,
        ],
        "tools": [SHELL, PATCH, WEB, MCP, *LEFT_OUT[2:4]],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a-thread",
        "client_metadata": {"x-codex-turn-metadata": "{}", "turn_id": "01a22572", "thread_id": "019a-thread"},
    }


def parsed(body: dict[str, Any]) -> ParsedResponse:
    limits = RequestLimits(model="tiny", max_sequences=64, max_prompt_tokens=512, formats=FORMATS)
    return parse_response(json.dumps(body).encode(), limits, Stored(), "seed")


def functions(found: m.ChatPrompt) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"] for tool in json.loads(found.tools)}


def test_codex_s_tools_become_functions() -> None:
    found = parsed(codex())
    (chat,) = found.request.prompts
    assert isinstance(chat, m.ChatPrompt) and chat.tool_choice == "auto"
    each = functions(chat)
    assert list(each) == ["shell_command", "apply_patch", "mcp__docs__search", "mcp__docs__now"]
    assert each["apply_patch"]["parameters"]["required"] == ["input"]
    assert PATCH["description"] in each["apply_patch"]["description"] and GRAMMAR in each["apply_patch"]["description"]
    assert each["mcp__docs__search"]["description"] == "Tools in the mcp__docs namespace.\n\nIt searches."
    assert each["mcp__docs__now"] == {"name": "mcp__docs__now"}
    assert found.request.left_out == ["image_generation", "tool_search", "web_search"]
    assert json.loads(reply_fields_of(found.request).tools) == [SHELL, PATCH, MCP], "those that it has"


@pytest.mark.parametrize("tool", LEFT_OUT, ids=lambda tool: tool["type"])
def test_tools_that_only_their_provider_runs_are_left_out(tool: dict[str, Any]) -> None:
    assert list(functions(prompt(tools=[tool, NOW]))) == ["now"]
    assert json.loads(reply_fields(tools=[tool, NOW]).tools) == [NOW]
    assert prompt(tools=[tool]).tools == ""
    assert json.loads(reply_fields(tools=[tool]).tools) == []


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "search"}, "mcp__docs__search"),
        ({"type": "function", "name": "find"}, "find"),
    ],
)
def test_a_choice_names_a_tool_as_the_body_does(choice: dict[str, str], name: str) -> None:
    found = prompt(tools=[WEB, PATCH, MCP, FIND], tool_choice=choice)
    assert (found.tool_choice, found.tool_name) == ("named", name)


def test_the_grammar_of_a_chosen_tool_names_its_place() -> None:
    found = parsed(codex() | {"tool_choice": {"type": "function", "name": "search"}}).request
    assert found.options.grammar is not None
    assert found.options.grammar.param == "tools[3].tools[0].parameters"


def tool_call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


INPUT = '*** Begin Patch\n*** Add File: a "é😀"\n+\\n\n*** End Patch\n'


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_and_its_results_are_items_of_the_tools(stream: bool) -> None:
    """And they come back in the next turn as what the model wrote."""
    request = parsed(codex() | {"stream": stream}).request
    calls = tool_call("apply_patch", input=INPUT), tool_call("mcp__docs__search", q="a"), tool_call("shell_command")
    text = "".join(calls)
    output = kept(
        DIALECTS["responses"], request, [text[i : i + 5] for i in range(0, len(text), 5)], m.Finish.STOP, FORMATS, ""
    )
    patch, search, shell = output
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", INPUT)
    assert "namespace" not in patch and "namespace" not in shell
    assert (search["type"], search["name"], search["namespace"]) == ("function_call", "search", "mcp__docs")
    assert (shell["name"], json.loads(shell["arguments"])) == ("shell_command", {})
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": f"{index}"}
        for index, item in enumerate(output)
    ]
    sent = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in output]
    (chat,) = parsed(codex(*sent, *results)).request.prompts
    assert isinstance(chat, m.ChatPrompt)
    said, *reported = chat.messages[4:]
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [
        ("apply_patch", {"input": INPUT}),
        ("mcp__docs__search", {"q": "a"}),
        ("shell_command", {}),
    ]
    assert [(one.role, one.content, one.tool_call_id) for one in reported] == [
        ("tool", f"{index}", item["call_id"]) for index, item in enumerate(output)
    ]


def test_the_events_of_a_custom_call() -> None:
    builder = OutputBuilder("s", reply_fields_of(parsed(codex()).request).called)
    written = json.dumps({"input": INPUT})
    events = events_of(builder, [call(0, "apply_patch"), arguments(0, written[:9])], [arguments(0, written[9:])])
    begins, ends = "output_item.added", "output_item.done"
    assert names(events) == [begins, "custom_tool_call_input.delta", "custom_tool_call_input.done", ends]
    added, delta, done, item_done = events
    assert (added["item"]["type"], added["item"]["input"], added["item"]["status"]) == (
        "custom_tool_call",
        "",
        "in_progress",
    )
    assert (delta["delta"], done["input"], item_done["item"]["input"]) == (INPUT, INPUT, INPUT)
    assert {event.get("item_id", event.get("item", {}).get("id")) for event in events} == {builder.items[0].id}


def test_every_cut_of_a_custom_tool_s_arguments_has_the_input_so_far() -> None:
    raw = '{"input": "a\n\tb"}', "a\n\tb"  # models don't always escape them
    for written, whole in ((arguments_of(INPUT), INPUT), (json.dumps({"input": INPUT}, indent=1), INPUT), raw):
        texts = [input_of(written[:index]) for index in range(written.index(': "') + 3, len(written) + 1)]
        assert all(whole.startswith(text) for text in texts)
        assert texts[0] == "" and texts[-1] == whole
    assert [input_of(text) for text in ("", "{}", '{"patch": "a"}', '["a"]')] == ["", "{}", '{"patch": "a"}', '["a"]']


def test_the_input_may_follow_other_arguments() -> None:
    assert input_of('{"reason": "input", "input": "a\\"b"}') == 'a"b'
    assert input_of('{"input": "a", "input": "b"}') == "b"
    assert input_of('{"input": 5}') == '{"input": 5}'


@pytest.mark.parametrize("piece", ["a", "\\n", "é"])
def test_reading_a_long_input_takes_memory_for_the_text_only(piece: str) -> None:
    """Also if the reply ends within it."""
    written = '{"input": "' + piece * 200_000
    tracemalloc.start()
    try:
        assert len(input_of(written)) == 200_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(written), "text, and not what a regular expression may try again"


def test_names_in_namespaces_are_those_of_functions() -> None:
    assert chat_name("find", "crm") == chat_name("find", "crm__") == "crm__find"
    assert chat_name("_search", "mcp__mail") == "mcp__mail_search"
    assert chat_name("a" * 59, "crm") == f"crm__{'a' * 59}", "as long as a function's name may be"
    long = [chat_name(f"{'a' * 60}{one}", "crm") for one in "bc"]
    assert len(set(long)) == 2 and {len(one) for one in long} == {64}


def test_codex_s_request_is_answered_and_the_log_says_what_was_left_out(tmp_path: Path) -> None:
    chat = ChatSettings(tool_call_parser="hermes", reasoning_parser="none")
    with lines_of("left out tools that only their provider runs") as found, Gate(tmp_path, chat=chat) as gate:
        response = gate.post(codex() | {"model": MODEL}, "/v1/responses")
        gate.delta(gate.begin(), tool_call("apply_patch", input=INPUT), num_ids=4, finish=m.Finish.STOP)
        events = stream_of(response.result().text)
    assert [(line["num"], line["types"]) for line in found] == [(3, "image_generation, tool_search, web_search")]
    last = Response.model_validate(events[-1]["response"])
    (call,) = last.output
    assert isinstance(call, ResponseCustomToolCall) and call.input == INPUT
    assert [tool.type for tool in last.tools] == ["function", "custom", "namespace"]


def test_a_namespace_that_is_allowed_many_times_costs_no_more_for_each_of_its_tools() -> None:
    def cpu_s(num: int) -> float:
        body = json.loads(a_namespace(num))
        tools = msgspec.convert(body["tools"], list[ResponseTool])
        choice = msgspec.convert(body["tool_choice"], FunctionChoice)
        begin_s = time.thread_time()
        ChatTools(tools).choice(choice)
        return time.thread_time() - begin_s

    assert min(cpu_s(8000) for _ in range(3)) < 24 * min(cpu_s(1000) for _ in range(3))
