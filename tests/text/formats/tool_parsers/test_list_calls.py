"""Calls that are the items of a list: how lists end, and what is read of those that are malformed or cut."""

import json

import pytest

from tests.text.formats.replies import parsed

VALUE = 'a]}, {"b": ['
"""A text with what ends a list or an item elsewhere"""


def items(form: str) -> tuple[str, str]:
    text = json.dumps({"text": VALUE})
    if form == "apertus":
        return f'{{"find": {text}}}', '{"now": {}}'
    return f'{{"name": "find", "arguments": {text}}}', '{"name": "now", "arguments": {}}'


MARKS = {
    "apertus": ("<|tools_prefix|>[", "]<|tools_suffix|>"),
    "granite": ("<|tool_call|>[", "]"),
    "phi4_mini_json": ("<|tool_call|>[", "]<|/tool_call|>"),
    "functools": ("functools[", "]"),
    "mistral": ("[TOOL_CALLS] [", "]"),
    "generic": ("<tool_call>[", "]</tool_call>"),
}
FORMS = {name: "phi4_mini_json" if name == "functools" else name for name in MARKS}
BOTH = [("find", json.dumps({"text": VALUE})), ("now", "{}")]


@pytest.mark.parametrize("name", FORMS)
def test_a_list_that_is_cut_anywhere_leaves_nothing_of_its_calls_in_the_content(name: str) -> None:
    form, (begin, end) = FORMS[name], MARKS[name]
    first, second = items(form)
    whole = f"{begin}{first}, {second}{end}"
    for cut in range(len(begin) + len(first), len(whole) + 1):
        reply = parsed(form, whole[:cut])
        assert (reply.content, reply.calls[0]) == ("", BOTH[0]), whole[:cut]
        assert reply.num_ended >= 1
    assert parsed(form, whole).calls == BOTH


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("between", [",", ", ", " , \n", " ", "", "}, ", "},"])
@pytest.mark.parametrize("behind", ["", ",", ", ", "}", " "])
def test_commas_and_braces_too_many_or_too_few_are_no_content(name: str, between: str, behind: str) -> None:
    form, (begin, end) = FORMS[name], MARKS[name]
    first, second = items(form)
    reply = parsed(form, f"Well. {begin}{first}{between}{second}{behind}{end}")
    assert (reply.content, reply.calls, reply.num_ended) == ("Well.", BOTH, 2)


@pytest.mark.parametrize("name", [name for name, (_, end) in MARKS.items() if end != "]"])
def test_the_end_mark_ends_a_list_without_a_bracket(name: str) -> None:
    form, (begin, end) = FORMS[name], MARKS[name]
    first, second = items(form)
    for comma in ("", ","):
        reply = parsed(form, f"{begin}{first}, {second}{comma}{end.removeprefix(']')} So.")
        assert (reply.content.strip(), reply.calls, reply.num_ended) == ("So.", BOTH, 2)


@pytest.mark.parametrize("name", FORMS)
def test_text_behind_a_list_is_content_and_so_is_what_is_no_item(name: str) -> None:
    form, (begin, end) = FORMS[name], MARKS[name]
    first, second = items(form)
    for behind in ("Then ] [text]", "] x", "[1]", '{"a": 1}', ", 5"):
        reply = parsed(form, f"{begin}{first}, {second}{end} {behind}")
        assert (reply.content.strip(), reply.calls, reply.num_ended) == (behind, BOTH, 2)
    for inside in (", 5, 6", ', {"x": 1}', "; so", ", null"):
        reply = parsed(form, f"{begin}{first}, {second}{inside}{end}")
        assert (reply.content.strip(), reply.calls) == ((inside + end).strip(), BOTH)


@pytest.mark.parametrize("empty", ["{}", "[{}]", '[{"a"}]', '[{"a", "b": {}}]', '[{"a": 1}]', "[{a: 1}]", "[]", "5"])
def test_what_can_be_no_call_of_apertus_hides_no_later_call(empty: str) -> None:
    first, _ = items("apertus")
    text = f"<|tools_prefix|>{empty} So. <|tools_prefix|>[{first}]<|tools_suffix|>"
    reply = parsed("apertus", text)
    assert (reply.content, reply.calls) == (f"<|tools_prefix|>{empty} So.", BOTH[:1])
