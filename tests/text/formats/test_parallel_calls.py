"""Three or more calls in one reply, in each format and under a grammar."""

import json
from typing import Any

import pytest

from tests.text.formats.replies import parsed, read
from tests.text.formats.test_grammars import TOOLS_JSON, check, formats, walk

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("find", {"text": "a"}),
    ("now", {}),
    ("add_2", {"n": [1, 2]}),
    ("find", {"text": "}]; {"}),
    ("now", {}),
]


def written(form: str, num: int) -> str:
    """A reply with `num` calls."""
    each = [(name, json.dumps(arguments)) for name, arguments in CALLS[:num]]
    match form:
        case "hermes":
            return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in each)
        case "llama3":
            return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in each)
        case "mistral, a list":
            objects = [f'{{"name": "{n}", "arguments": {a}}}' for n, a in each]
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case _:
            return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in each)


@pytest.mark.parametrize("num", [3, 4, 5])
@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral, a list", "mistral, one by one"])
def test_all_calls_of_a_reply_are_read(form: str, num: int) -> None:
    reply = parsed(form.partition(",")[0], written(form, num))
    assert [(name, json.loads(arguments)) for name, arguments in reply.calls] == CALLS[:num]
    assert (reply.content.strip(), reply.num_ended) == ("", num)


@pytest.mark.parametrize(
    ("tools", "template"), [("hermes", ""), ("llama3", ""), ("mistral", ""), ("mistral", "[ARGS]")]
)
def test_a_grammar_of_calls_allows_three_or_more(tools: str, template: str) -> None:
    form = formats(tools, template=template)
    grammar = form.calls("required", "", TOOLS_JSON, parallel=True).lark()
    nums = set()
    for seed in range(60):
        text = walk(grammar, seed)
        reply = read(form.parser("required", ("find", "find_all", "now")), [text])
        check(reply)
        nums.add(len(reply.calls))
    assert max(nums) >= 3
