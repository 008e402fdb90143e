"""Tools, calls and results become text of the messages for templates that don't show them."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.stages.ingest.templates import chat_templates
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import TemplateFailure
from pipeline.stages.ingest.templates.tools_as_text import with_tools_as_text
from tests.stages.ingest.models import CHATML
from tests.stages.ingest.templates.chats import TEMPLATES, Chat, prompt

FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1.50}'}},
    {"id": "c2", "type": "function", "function": {"name": "find", "arguments": '{"cut'}},
]
HI: Chat = [{"role": "user", "content": "Hi"}]
RESULTS: Chat = [
    *HI,
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
]


def written(messages: Chat, *, takes_system: bool = True, **options: Any) -> list[tuple[str, str | None]]:
    chat = with_tools_as_text(prompt(messages, **options), takes_system=takes_system)
    assert (chat.tools, chat.tool_choice) == ("", "none")
    return [(message.role, message.content) for message in chat.messages]


def test_calls_and_results_are_text_also_without_tools() -> None:
    assert written(RESULTS) == [
        ("user", "Hi"),
        (
            "assistant",
            'I look.\n<tool_call>\n{"name": "find", "arguments": {"n": 1.50}}\n</tool_call>\n'
            '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>',
        ),
        ("user", "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"),
    ]


def test_tools_are_in_the_system_message() -> None:
    (role, section), user = written(HI, tools=[FIND])
    assert role == "system" and section is not None and '"name": "find"' in section and user == ("user", "Hi")
    for own in ("system", "developer"):
        (role, content), _ = written([{"role": own, "content": "Be brief."}, *HI], tools=[FIND])
        assert (role, content) == (own, f"Be brief.\n\n{section}")
    assert written(HI, tools=[FIND], tool_choice="none") == [("user", "Hi")]


def test_tools_are_in_the_first_user_message_if_there_can_be_no_system_message() -> None:
    (message,) = written(HI, tools=[FIND], takes_system=False)
    assert message[0] == "user" and message[1] is not None
    assert message[1].startswith("# Tools") and message[1].endswith("\n\nHi")


def test_parts_of_a_message_keep_their_text() -> None:
    chat = ChatPrompt([ChatMessage("system", "a\nb", parts=["a", "b"])], tools="[{}]")
    (message,) = with_tools_as_text(chat, takes_system=True).messages
    assert message.parts is not None and message.parts[0] == "a" and message.parts[1].startswith("b\n\n# Tools")


def test_images_stay_where_they_are_in_results() -> None:
    first = ChatMessage("tool", "a\nb", parts=["a", "b"], image_offsets=[0, 1, 1, 2], tool_call_id="c1")
    second = ChatMessage("tool", "c", tool_call_id="c2")
    only = ChatMessage("tool", "", parts=[], image_offsets=[0], tool_call_id="c3")
    (message,) = with_tools_as_text(ChatPrompt([first, second, only]), takes_system=True).messages
    assert message.role == "user" and message.tool_call_id is None
    assert message.parts == [
        "<tool_response>\n",
        "a\n",
        "b\n",
        "\n</tool_response>\n<tool_response>\nc\n</tool_response>\n<tool_response>\n",
        "\n</tool_response>",
    ]
    assert message.image_offsets == [1, 2, 2, 3, 4] and message.content == "".join(message.parts)


def test_images_of_the_first_message_stay_behind_the_section() -> None:
    chat = ChatPrompt([ChatMessage("user", "a\nb", parts=["a", "b"], image_offsets=[0, 1])], tools="[{}]")
    (message,) = with_tools_as_text(chat, takes_system=False).messages
    assert message.parts is not None and message.parts[0].startswith("# Tools") and message.parts[1:] == ["a", "b"]
    assert message.image_offsets == [1, 2]


def test_tools_that_are_no_objects_are_refused() -> None:
    with pytest.raises(BadChat, match="'tools' must be an array of objects"):
        written(HI, tools=[1])


def rendered(folder: Path, source: str, chat: ChatPrompt, *, shows_tools: bool = False) -> str:
    (folder / "chat_template.jinja").write_text(source)
    templates = chat_templates.load(folder, {"bos_token": "<s>", "eos_token": "</s>"}, 10.0, shows_tools=shows_tools)
    return templates.text(chat, max_chars=10**6, now_s=0.0, is_short=False)


def test_a_template_without_tools_shows_them(tmp_path: Path) -> None:
    chat = prompt(RESULTS, tools=[FIND])
    text = rendered(tmp_path, CHATML, chat)
    assert text.index("# Tools") < text.index("Hi") < text.index('"n": 1.50') < text.index("<tool_response>\none")
    assert "# Tools" not in rendered(tmp_path, CHATML, chat, shows_tools=True)


def test_a_template_that_refuses_system_messages_shows_them_to_the_user(tmp_path: Path) -> None:
    gemma = (TEMPLATES / "gemma2.jinja").read_text()
    with pytest.raises(TemplateFailure, match="System role not supported"):
        rendered(tmp_path, gemma, prompt([{"role": "system", "content": "x"}, *HI]))
    text = rendered(tmp_path, gemma, prompt(HI, tools=[FIND]))
    assert "<start_of_turn>user\n# Tools" in text and "Hi<end_of_turn>" in text


def test_a_message_with_results_can_end_the_chat_and_one_with_calls_be_continued(tmp_path: Path) -> None:
    chat = prompt(RESULTS[:2], tools=[FIND], continue_final_message=True, add_generation_prompt=False)
    assert rendered(tmp_path, CHATML, chat).endswith("</tool_call>")


def test_results_of_several_calls_are_one_message() -> None:
    results: Chat = [{"role": "tool", "tool_call_id": "c", "content": str(index)} for index in range(4)]
    chat: Chat = [{"role": "user", "content": "Hi"}, *results, {"role": "user", "content": "Go"}, results[0]]
    each = written(chat)
    assert [role for role, _ in each] == ["user", "user", "user", "user"]
    assert (each[1][1] or "").count("<tool_response>") == 4 and (each[3][1] or "").count("<tool_response>") == 1
