"""The tool-call format for chat templates without one."""

import json

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.text.formats.chat_formats import GENERIC, ChatFormats
from pipeline.text.formats.parsing.events import CallEnded, Content
from pipeline.text.formats.tool_parsers.generic import call_text, result_text, tools_section
from tests.text.formats.replies import Reply, parsed

FIND = '{"name": "find", "arguments": {"text": "a"}}'
FOUND = ("find", '{"text": "a"}')
NOW = '{"name": "now", "arguments": {}}'


def test_it_is_for_templates_without_a_format_of_their_own() -> None:
    plain = ChatFormats.of("{{ messages }}", ChatSettings())
    assert (plain.tools, plain.shows_tools) == (GENERIC, False)
    hermes = ChatFormats.of("{{ messages }} <tool_call>", ChatSettings())
    assert hermes.tools is not None and (hermes.tools.name, hermes.shows_tools) == ("hermes", True)
    assert ChatFormats.of("{{ messages }} <tool_call>", ChatSettings(tool_call_parser="generic")).tools is GENERIC
    separate = ChatFormats.of("{{ messages }}", ChatSettings(), tool_template="{{ tools }} <tool_call>")
    assert separate.tools is not None and separate.tools.name == "hermes"
    for off in (ChatFormats.of("{{ x }}", ChatSettings(tool_call_parser="none")), ChatFormats.of("", ChatSettings())):
        assert off.tools is None and off.shows_tools


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call_text(*FOUND), "", [FOUND]),
        (f"I look.\n{call_text(*FOUND)}\n{call_text('now', '{}')}", "I look.", [FOUND, ("now", "{}")]),
        (f"<tool_call>{FIND}</tool_call> Done.", "Done.", [FOUND]),
        (f"<tool_call>\n[{FIND}, {NOW}]\n</tool_call>", "", [FOUND, ("now", "{}")]),
        (f"<tool_call>[{FIND}]</tool_call>\n{call_text('now', '{}')}", "", [FOUND, ("now", "{}")]),
        (f"  {FIND}", "", [FOUND]),
        (f"{FIND}\nThat is it.", "That is it.", [FOUND]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('{"city": "Athens"}', '{"city": "Athens"}', []),
        (f"See: {FIND}", f"See: {FIND}", []),
        ("<tool_call>[1, 2]</tool_call>", "<tool_call>[1, 2]</tool_call>", []),
        ("<tool_call>[[]]</tool_call> no", "<tool_call>[[]]</tool_call> no", []),
        ("Plain <tool", "Plain <tool", []),
        ("", "", []),
    ],
)
def test_replies_are_parsed_whatever_their_chunks(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    reply = parsed("generic", text)
    assert (reply.content.strip(), reply.calls, reply.num_ended) == (content, calls, len(calls))


def test_a_cut_call_is_incomplete() -> None:
    assert parsed("generic", '<tool_call>\n{"name": "find", "arguments": {"te') == Reply(calls=[("find", '{"te')])
    assert parsed("generic", '<tool_call>[{"na').content == '<tool_call>[{"na'


def test_the_section_lists_the_tools_and_the_form_that_is_parsed() -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "Größe"}}]
    section = tools_section(tools, choice="auto", name="", parallel=True)
    assert json.dumps(tools[0], ensure_ascii=False) in section
    assert "one or more" in section and "answer directly" in section
    assert '<tool_call>\n{"name": <function name>, "arguments": <arguments as a JSON object>}\n</tool_call>' in section
    assert "one or more" not in tools_section(tools, choice="auto", name="", parallel=False)
    assert "You must call one of" in tools_section(tools, choice="required", name="", parallel=False)
    assert "You must call the function find" in tools_section(tools, choice="named", name="find", parallel=True)
    assert result_text("4") == "<tool_response>\n4\n</tool_response>"


@pytest.mark.parametrize("cut", ["\n<tool", "\n<tool_call>", '\n<tool_call>\n{"name": "'])
def test_a_required_reply_that_is_cut_in_a_mark_has_no_content(cut: str) -> None:
    whole = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for choice, has_content in (("required", False), ("auto", True)):
        parser = ChatFormats(tools=GENERIC).parser(choice, ["f"])
        events = [*parser.push(whole + cut), *parser.finish()]
        assert any(isinstance(event, CallEnded) for event in events)
        assert any(isinstance(event, Content) for event in events) == has_content
