"""Bodies of /v1/messages become the request that /v1/chat/completions makes, or are rejected by the field's name."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.config.settings import LimitSettings as Caps
from pipeline.http_server.apis.anthropic import error_json
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.bodies import KEEP_ALL_THINKING, MESSAGES_UNSUPPORTED_FIELDS
from pipeline.stages.gateway.apis.anthropic.events import MESSAGES
from pipeline.stages.gateway.apis.anthropic.parsing import parse_count_tokens, parse_messages
from pipeline.stages.gateway.apis.openai.reply import CHAT
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.chat.conversation import ReplyParsing
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from tests.stages.gateway.parsing.bodies import chat

FORMATS = ChatFormats.of("", ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3"))
LIMITS = RequestLimits(model="tiny", max_sequences=64, formats=FORMATS, max_prompt_tokens=512)
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
FIND = {"name": "find", "description": "Finds", "input_schema": {"type": "object", "properties": {"x": {"const": 1.0}}}}
NOW = {"type": "custom", "name": "now", "input_schema": {}}
TOOL_USE = {"type": "tool_use", "id": "toolu_abc", "name": "find", "input": {"x": 1.50}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_abc", "content": "found"}


def parse(limits: RequestLimits = LIMITS, **fields: Any) -> ParsedRequest:
    return parse_messages(json.dumps(BODY | fields).encode(), limits)


def prompt_of(*messages: Any, **fields: Any) -> m.ChatPrompt:
    (prompt,) = parse(messages=messages, **fields).prompts
    assert isinstance(prompt, m.ChatPrompt)
    return prompt


def says(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(**fields)
    return error.value


# --------------------------------------------------------------------------------------------------------- the request


def test_it_is_the_chat_request_with_the_same_fields() -> None:
    ours = parse(stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=4, stream=True)
    theirs = chat(max_tokens=9, stop=["a", "b"], temperature=0.5, top_p=0.9, top_k=4, stream=True)
    assert ours.options == theirs.options
    assert (ours.stream, ours.dialect, theirs.dialect) == (True, MESSAGES, CHAT)
    assert ours.prompts == theirs.prompts


def test_defaults_are_those_of_chats() -> None:
    assert parse().options == chat(max_tokens=9).options


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "unknown": 1},
        dict.fromkeys(("system", "stop_sequences", "stream", "tools", "tool_choice", "thinking")),
        dict.fromkeys(MESSAGES_UNSUPPORTED_FIELDS),
        {"mcp_servers": [], "speed": "standard", "context_management": {"edits": [KEEP_ALL_THINKING]}},
        {"output_config": {}, "system": "", "tools": [], "temperature": None, "top_p": None, "top_k": None},
    ],
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


def test_system_prompts_come_first() -> None:
    user = m.ChatMessage("user", "Hi")
    assert prompt_of(*BODY["messages"], system="Be brief.").messages == [m.ChatMessage("system", "Be brief."), user]
    both = prompt_of(*BODY["messages"], system=[text("Be brief."), text("Be kind.")]).messages
    assert both == [m.ChatMessage("system", "Be brief.\nBe kind.", parts=["Be brief.", "Be kind."]), user]


def test_the_billing_header_of_claude_code_is_no_part_of_the_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.197.73f; cc_entrypoint=sdk-cli;")
    user = prompt_of(*BODY["messages"]).messages[0]
    both = prompt_of(*BODY["messages"], system=[billing, text("Be brief.")]).messages
    assert both == [m.ChatMessage("system", "Be brief.", parts=["Be brief."]), user]
    assert prompt_of(*BODY["messages"], system=[billing]).messages == [user]


def test_a_system_message_stays_in_its_place() -> None:
    user, system = BODY["messages"][0], {"role": "system", "content": "Now in French."}
    assert [one.role for one in prompt_of(user, system, user).messages] == ["user", "system", "user"]


def test_a_tool_call_and_its_result() -> None:
    found = prompt_of(
        {"role": "user", "content": "Find it"},
        says("assistant", {"type": "thinking", "thinking": "Hm", "signature": "s"}, text("I look."), TOOL_USE),
        says("user", RESULT, text("And?")),
    )
    assert found.messages == [
        m.ChatMessage("user", "Find it"),
        m.ChatMessage(
            "assistant",
            "I look.",
            parts=["I look."],
            tool_calls=[m.ToolCall("abc", "find", '{"x": 1.5}')],
            reasoning="Hm",
        ),
        m.ChatMessage("tool", "found", tool_call_id="abc"),
        m.ChatMessage("user", "And?", parts=["And?"]),
    ]
    assert (found.add_generation_prompt, found.continue_final_message) == (True, False)


def test_a_message_of_only_calls_has_no_content() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    call = prompt_of(says("assistant", redacted, TOOL_USE), says("user", RESULT)).messages[0]
    assert (call.content, call.reasoning, len(call.tool_calls)) == (None, None, 1)


@pytest.mark.parametrize(
    ("fields", "content", "parts"),
    [
        ({"content": [text("a"), text("b")]}, "a\nb", ["a", "b"]),
        ({"content": []}, "", []),
        ({"content": None}, "", None),
        ({"content": "no file", "is_error": True}, "Error: no file", None),
        ({"content": "Error: no file", "is_error": True}, "Error: no file", None),
        ({"content": [text("no"), text("file")], "is_error": True}, "Error: no\nfile", ["Error: no", "file"]),
        ({"content": None, "is_error": True}, "Error: ", None),
    ],
)
def test_contents_of_results(fields: Any, content: str, parts: list[str] | None) -> None:
    result = prompt_of(says("assistant", TOOL_USE), says("user", RESULT | fields)).messages[-1]
    assert (result.content, result.parts) == (content, parts)


def test_consecutive_messages_of_a_role_are_one() -> None:
    found = prompt_of(*({"role": "user", "content": words} for words in "abc"), says("user", text("d"))).messages
    assert found == [m.ChatMessage("user", "a\nb\nc\nd", parts=["a", "b", "c", "d"])]


def test_the_reply_continues_a_last_message_of_the_assistant() -> None:
    found = prompt_of(*BODY["messages"], {"role": "assistant", "content": "The best is ("})
    assert (found.add_generation_prompt, found.continue_final_message) == (False, True)
    for blocks in ([TOOL_USE], [text("a"), TOOL_USE]):
        error = refused(messages=[*BODY["messages"], says("assistant", *blocks)])
        assert (error.status, error.param) == (400, "messages[1].content")
        assert "must not have tool calls" in error.message


@pytest.mark.parametrize(
    ("content", "reasoning"),
    [("", None), ([], None), ([text("")], None), ([{"type": "thinking", "thinking": "Hm"}], "Hm")],
)
def test_the_reply_continues_a_message_without_text(content: Any, reasoning: str | None) -> None:
    """A reply that was cut before its text, such as one with the stop reason pause_turn."""
    found = prompt_of(*BODY["messages"], {"role": "assistant", "content": content})
    assert (found.add_generation_prompt, found.continue_final_message) == (False, True)
    last = found.messages[-1]
    assert (last.role, last.content, last.reasoning, last.tool_calls) == ("assistant", "", reasoning, [])


def test_text_and_thinking_go_on_behind_other_blocks() -> None:
    """As in the chat's form of the same reply. Blocks that the client divides are lines."""

    def thinking(words: str) -> dict[str, str]:
        return {"type": "thinking", "thinking": words}

    blocks = (thinking("a"), text("b"), thinking("c"), text("d"), TOOL_USE, text("e"))
    (_, found, _) = prompt_of(*BODY["messages"], says("assistant", *blocks), says("user", RESULT)).messages
    assert (found.content, found.reasoning, len(found.tool_calls)) == ("bde", "ac", 1)
    lines = (thinking("a"), thinking("b"), text("c"), text(""), text("d"))
    (_, found, _) = prompt_of(*BODY["messages"], says("assistant", *lines), says("user", text("?"))).messages
    assert (found.content, found.reasoning, found.parts) == ("c\nd", "a\nb", ["c", "d"])


# --------------------------------------------------------------------------------------------------------------- tools


def test_tools_get_the_shape_that_templates_expect() -> None:
    prompt = prompt_of(*BODY["messages"], tools=[FIND, NOW])
    function = {"name": "find", "description": "Finds", "parameters": FIND["input_schema"]}
    now = {"name": "now", "parameters": {}}
    assert json.loads(prompt.tools) == [{"type": "function", "function": one} for one in (function, now)]
    assert '"const": 1.0' in prompt.tools, "numbers keep their digits"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "", True)),
        ({"type": "auto"}, ("auto", "", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", "", False)),
        ({"type": "any"}, ("required", "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", "", False)),
        ({"type": "tool", "name": "now"}, ("named", "now", True)),
        ({"type": "none"}, ("none", "", True)),
    ],
)
def test_tool_choices(choice: Any, expected: tuple[str, str, bool]) -> None:
    parsed = parse(tools=[FIND, NOW], tool_choice=choice)
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.ChatPrompt)
    assert (prompt.tool_choice, prompt.tool_name, prompt.parallel_tool_calls) == expected
    names = [] if expected[0] == "none" else ["find", "now"]
    assert parsed.reply == ReplyParsing(expected[0], dict.fromkeys(names, ""), expected[2])
    assert (parsed.options.grammar is not None) == (expected[0] in ("required", "named"))


def test_a_grammar_names_the_field_of_this_api() -> None:
    named = parse(tools=[FIND, NOW], tool_choice={"type": "tool", "name": "now"}).options.grammar
    assert named is not None and named.param == "tools[1].input_schema"
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    grammar = parse(output_config={"format": schema}).options.grammar
    assert grammar == m.Grammar("closed_schema", '{"type": "object"}', "output_config.format.schema")


def test_long_tool_names_are_accepted() -> None:
    name = "mcp__server__" + "x" * 115
    assert parse(tools=[NOW | {"name": name}]).reply == ReplyParsing("auto", {name: ""})


# ------------------------------------------------------------------------------------------------------------ thinking


@pytest.mark.parametrize(
    ("fields", "kwargs", "shown"),
    [
        ({}, None, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}}, {"enable_thinking": True}, False),
        ({"thinking": {"type": "adaptive"}}, None, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, False),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none", "enable_thinking": False}, False),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}, True),
    ],
)
def test_thinking_becomes_variables_of_the_template(fields: Any, kwargs: Any, shown: bool) -> None:
    parsed = parse(**fields)
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.ChatPrompt)
    assert (json.loads(prompt.template_kwargs) if prompt.template_kwargs else None) == kwargs
    assert parsed.reply == ReplyParsing(with_reasoning=shown)


# ------------------------------------------------------------------------------------------------------------ refusals

USER = BODY["messages"][0]
BLOCK = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [says("user")]}, "messages[0].content"),
        ({"messages": [says("user", 1)]}, BLOCK),
        ({"messages": [says("user", {"text": "x"})]}, f"{BLOCK}.type"),
        ({"messages": [says("user", {"type": "image", "source": {"type": "url", "url": "x"}})]}, BLOCK),
        ({"messages": [says("user", {"type": "document", "source": {}})]}, BLOCK),
        ({"messages": [says("user", {"type": "search_result"})]}, BLOCK),
        ({"messages": [says("user", {"type": "text"})]}, f"{BLOCK}.text"),
        ({"messages": [says("user", TOOL_USE)]}, f"{BLOCK}.type"),
        ({"messages": [says("user", {"type": "thinking", "thinking": "x"})]}, f"{BLOCK}.type"),
        ({"messages": [says("user", {"type": "redacted_thinking"})]}, f"{BLOCK}.type"),
        ({"messages": [says("assistant", RESULT)]}, f"{BLOCK}.type"),
        ({"messages": [says("assistant", TOOL_USE | {"id": ""})]}, f"{BLOCK}.id"),
        ({"messages": [says("assistant", TOOL_USE | {"input": "{}"})]}, f"{BLOCK}.input"),
        ({"messages": [says("assistant", {"type": "tool_use", "id": "a", "name": "f"})]}, f"{BLOCK}.input"),
        ({"messages": [says("user", {"type": "tool_result"})]}, f"{BLOCK}.tool_use_id"),
        ({"messages": [says("user", RESULT | {"content": [{"type": "image"}]})]}, f"{BLOCK}.content[0]"),
        ({"messages": [USER] * 513}, "messages"),
        ({"messages": [says("user", *[RESULT] * 513)]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 1}, "system"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * (Caps().max_stop_strings + 1)}, "stop_sequences"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [NOW | {"name": "x" * 129}]}, "tools[0].name"),
        ({"tools": [NOW, NOW]}, "tools[1].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [NOW | {"name": f"f{i}"} for i in range(Caps().max_tools + 1)]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "find"}}, "tool_choice.name"),
        ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": {}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": "{}"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"compaction": {}}, "compaction"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"speed": "fast"}, "speed"),
        ({"thread": {}}, "thread"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)
    assert param in json.loads(error_json(error, "req_1"))["error"]["message"], "Anthropic's errors have only a message"


def test_missing_fields_are_named() -> None:
    for name in BODY:
        with pytest.raises(ApiError, match=f"'{name}' is required") as error:
            parse_messages(json.dumps({key: value for key, value in BODY.items() if key != name}).encode(), LIMITS)
        assert error.value.status == 400


def test_another_model_is_not_found() -> None:
    error = refused(model="claude")
    assert (error.status, error.code) == (404, "model_not_found")


def test_tools_need_a_known_format_unless_they_are_required() -> None:
    limits = msgspec.structs.replace(LIMITS, formats=ChatFormats())
    with pytest.raises(ApiError, match=r"'tools' is not supported.*chat\.tool_call_parser.*any"):
        parse(limits, tools=[NOW])
    assert parse(limits, tools=[NOW], tool_choice={"type": "any"}).reply == ReplyParsing("required", {"now": ""})
    assert parse(limits, tools=[NOW], tool_choice={"type": "none"}).reply is None


def test_required_calls_exclude_an_output_format() -> None:
    form = {"format": {"type": "json_schema", "schema": {}}}
    error = refused(tools=[NOW], tool_choice={"type": "any"}, output_config=form)
    assert (error.param, "'output_config.format.schema' is not allowed" in error.message) == (
        "output_config.format.schema",
        True,
    )


def test_a_refused_thread_has_the_details_that_clients_look_for() -> None:
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert json.loads(error_json(refused(thread={"type": "create"}), "req_1"))["error"]["details"] == details
    assert "details" not in json.loads(error_json(refused(speed="fast"), "req_1"))["error"]


# -------------------------------------------------------------------------------------------------------- count_tokens


def test_counting_takes_the_prompt_fields_only() -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "tools": [FIND], "tool_choice": {"type": "any"}}
    body = {"model": "tiny", "messages": BODY["messages"], **fields}
    counted = parse_count_tokens(json.dumps(body).encode(), LIMITS)
    assert counted.prompts == parse(**fields).prompts
    assert counted.is_prompt_only and counted.options.max_tokens == 0


@pytest.mark.parametrize(("fields", "status"), [({"model": "x"}, 404), ({"messages": []}, 400), ({"thread": {}}, 400)])
def test_counting_refuses_invalid_bodies(fields: dict[str, Any], status: int) -> None:
    with pytest.raises(ApiError) as error:
        parse_count_tokens(json.dumps(BODY | fields).encode(), LIMITS)
    assert error.value.status == status
