"""Which messages an Anthropic client marks for the prefix cache."""

from pipeline.runtime import messages as m
from tests.stages.gateway.parsing.test_anthropic import parse, text


def test_cache_control_marks_the_message_of_its_block() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"} | mark
    messages = [
        {"role": "user", "content": [text("One") | mark, text("Hi")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]},
        {"role": "user", "content": [result, text("And?")]},
    ]
    prompt = parse(messages=messages).prompts[0]
    assert isinstance(prompt, m.ChatPrompt)
    assert [(one.role, one.is_cache_mark) for one in prompt.messages] == [
        ("user", True),
        ("assistant", False),
        ("tool", True),
        ("user", False),
    ]
