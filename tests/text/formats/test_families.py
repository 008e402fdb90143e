"""Replies of model families with formats of their own: valid, malformed and cut, in any pieces."""

import json
from collections.abc import Callable

import pytest

from pipeline.text.formats.parsing.events import CallBegun
from tests.text.formats.calls import DS, EACH, KIMI, glm, kimi, qwen, seed
from tests.text.formats.replies import NAMES, TOOLS, Reply, formats, parsed


@pytest.mark.parametrize(
    ("form", "write", "text"),
    [
        ("glm45", glm, "<arg_key>b</arg_key> </tool_call> <arg_key>text</arg_key>\n</tool_call>."),
        ("qwen3_coder", qwen, "<parameter=b> </function> <parameter=text>\n</function>.\n</tool_call>?"),
        ("seed_oss", seed, "<parameter=b></parameter </function>\n\n</seed:tool_call"),
        ("qwen3_coder", qwen, f"</function>{' ' * 99}</tool_call>"),
        ("glm45", glm, "</arg_value> </arg_value>\n<b></arg_value>x</arg_value>\n"),
        ("glm45", glm, "<arg_key>a</arg_key><arg_value>b</arg_value> <arg_keys></arg_value></tool_calls>"),
        ("qwen3_coder", qwen, "\n</parameter>\n</parameter>.</parameter>"),
        ("qwen3_coder", qwen, "x\n</parameter>\n\n<parameters></parameter> </functions>\n</parameter>\n<b>"),
        ("seed_oss", seed, "<parameter=b></parameter>\n.</parameter></parameter>"),
    ],
)
def test_texts_may_have_tags_that_end_no_value(form: str, write: Callable[..., str], text: str) -> None:
    reply = parsed(form, write("find", text=text, n="5"))
    assert [(name, json.loads(arguments)) for name, arguments in reply.calls] == [("find", {"text": text, "n": 5})]


@pytest.mark.parametrize(
    ("form", "write", "value"),
    [("glm45", glm, '["</arg_value>", "a"]'), ("qwen3_coder", qwen, '["</parameter>\\n</parameter>", 1]')],
)
def test_texts_in_lists_may_have_end_tags(form: str, write: Callable[..., str], value: str) -> None:
    reply = parsed(form, write("add_2", xs=value, code="a"))
    assert [json.loads(arguments) for _, arguments in reply.calls] == [{"xs": json.loads(value), "code": "a"}]


TAGS_IN_STRINGS = {
    "glm45": '["</arg_value><arg_key>code</arg_key>", {"\\"</arg_value></tool_call>": "</tool_call>"}, "\\\\"]',
    "qwen3_coder": '["</parameter><parameter=code>", {"\\"</parameter></function>": "</tool_call>"}, "\\\\"]',
    "seed_oss": '["</parameter><parameter=code></function></seed:tool_call>", "\\u0041</parameter> </function>"]',
}


@pytest.mark.parametrize("key", ["xs", "at", "any"])
@pytest.mark.parametrize(("form", "write"), [("glm45", glm), ("qwen3_coder", qwen), ("seed_oss", seed)])
def test_no_tag_in_a_string_of_a_json_value_ends_it(form: str, write: Callable[..., str], key: str) -> None:
    value = TAGS_IN_STRINGS[form]
    if key != "xs":
        value = f'{{"a": {value}}}' if key == "at" else json.dumps(value)
    name, behind = ("add_2", {"code": "a"}) if key == "xs" else ("find", {"text": "a"})
    reply = parsed(form, f"{write(name, **{key: value}, **behind)}\n{write('now')}")
    found = [(name, json.loads(arguments)) for name, arguments in reply.calls]
    assert found == [(name, {key: json.loads(value), **behind}), ("now", {})]


@pytest.mark.parametrize(("form", "write"), [("glm45", glm), ("qwen3_coder", qwen), ("seed_oss", seed)])
@pytest.mark.parametrize("value", ['["a', "[1, 'it\"s']", '{"a": "b, "c": "}', '"a'])
def test_a_string_without_end_hides_no_tag(form: str, write: Callable[..., str], value: str) -> None:
    text = f"{write('add_2', xs=value, code='a')}\n{write('now')}"
    for specials in ((), TOOLS[form].marks):
        reply = parsed(form, text, specials=specials)
        assert [name for name, _ in reply.calls] == ["add_2", "now"]
        assert json.loads(reply.calls[0][1])["code"] == "a"


def test_an_end_tag_before_much_white_space_ends_a_text() -> None:
    """So that no more is held back."""
    text = f"<function=find>\n<parameter=text>\na\n</parameter>{' ' * 65}"
    assert parsed("qwen3_coder", f"{text}b").calls == [("find", '{"text": "a"}')]
    assert parsed("qwen3_coder", f"{text[:-1]}b").calls == [("find", f'{{"text": "a\\n</parameter>{" " * 64}b')]


@pytest.mark.parametrize("rest", ["", "\n", "\n<", "\n</func", "\n</function>\n</tool"])
def test_a_text_ends_at_its_end_tag_where_the_reply_ends(rest: str) -> None:
    reply = parsed("qwen3_coder", f"<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>{rest}")
    assert [arguments.removesuffix("}") for _, arguments in reply.calls] == ['{"text": "a"']


@pytest.mark.parametrize(("form", "text", "content", "calls"), EACH)
def test_calls_are_parsed(form: str, text: str, content: str, calls: list[tuple[str, object]]) -> None:
    for specials in ((), TOOLS[form].marks):
        reply = parsed(form, text, specials=specials)
        assert [(name, json.loads(arguments)) for name, arguments in reply.calls][: len(calls)] == calls
        assert reply.num_ended == len(reply.calls)
        assert (reply.content, len(reply.calls)) == (content, len(calls))


@pytest.mark.parametrize(
    ("form", "text", "begun"),
    [
        ("deepseek_v31", f'{DS[0]}{DS[1]}find{DS[2]}{{"text": "ha', '{"text": "ha'),
        ("kimi_k2", f'{KIMI[0]}{KIMI[1]}functions.find:0{KIMI[2]}{{"text": "ha', '{"text": "ha'),
        ("granite", '<|tool_call|>[{"name": "find", "arguments": {"text": "ha', '{"text": "ha'),
        ("glm45", "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>ha</arg_v", '{"text": "ha'),
        ("glm45", "<tool_call>find\n<arg_key>n</arg_key>\n<arg_value>1", '{"n": '),
        ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=text>\nha\n</para", '{"text": "ha'),
        ("gemma4", '<|tool_call>call:find{text:<|"|>ha<|', '{"text": "ha'),
        ("gemma4", "<|tool_call>call:find{n:1", '{"n": '),
        ("apertus", '<|tools_prefix|>[{"find": {"text": "ha', '{"text": "ha'),
        ("pythonic", "[find(text='ha\\", '{"text": "ha'),
        ("openai", '<|channel|>commentary to=functions.find<|message|>{"text": "ha', '{"text": "ha'),
    ],
)
def test_a_cut_call_keeps_its_arguments_so_far(form: str, text: str, begun: str) -> None:
    assert parsed(form, text) == Reply(calls=[("find", begun)], num_ended=0)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("deepseek_v31", f"{DS[0]} nothing"),
        ("deepseek_v31", f"{DS[0]}{DS[1]}find it"),
        ("deepseek_v31", f"{DS[1]}{DS[2]}{{}}"),
        ("kimi_k2", f"{KIMI[0]}{KIMI[1]}functions.find:0 {{}}"),
        ("kimi_k2", f"{KIMI[1]}two words{KIMI[2]}{{}}"),
        ("kimi_k2", KIMI[1] + "f" * 900),
        ("granite", "<|tool_call|> none"),
        ("granite", "<|tool_call|>[1, 2]"),
        ("glm45", "<tool_call>"),
        ("apertus", "<|tools_prefix|>[1, 2]"),
        ("apertus", '<|tools_prefix|>[{"find": 1}]'),
        ("apertus", '<|tools_prefix|>[{"' + "f" * 900),
        ("apertus", '<|tools_prefix|>[{"find'),
        ("glm45", "<tool_call>find the words</tool_call>"),
        ("glm45", '<tool_call>{"name": "find"}</tool_call>'),
        ("glm45", "<tool_call>" + "f" * 400),
        ("qwen3_coder", "<tool_call>\nfind\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=>\n"),
        ("gemma4", "<|tool_call>call:find"),
        ("gemma4", "<|tool_call>find{}"),
        ("gemma4", "<|tool_call>call:find(1)"),
        ("pythonic", "[find(1)]"),
        ("pythonic", "[find(text"),
        ("pythonic", "The list [now()]"),
        ("olmo3", "<function_calls>1 + 1</function_calls>"),
        ("glm4", "find it"),
        ("glm4", "find\nit"),
    ],
)
def test_text_that_only_resembles_a_call_is_unchanged_content(form: str, text: str) -> None:
    assert parsed(form, text) == Reply(content=text)


@pytest.mark.parametrize(
    ("form", "text", "calls", "content"),
    [
        ("deepseek_v31", f"{DS[0]}{DS[1]}now{DS[2]}{{}} so", [{}], "so"),
        ("glm45", "<tool_call>find\n<arg_key>n</arg_key> 5 </tool_call> so", [{}], "5 </tool_call> so"),
        ("glm45", "<tool_call>find\n<arg_key>n</arg_key><arg_value>5</arg_value> oops", [{"n": 5}], "oops"),
        ("qwen3_coder", "<tool_call><function=find> oops", [{}], "oops"),
        ("gemma4", '<|tool_call>call:find{text:<|"|>a<|"|> oops', [{"text": "a"}], "oops"),
        ("gemma4", "<|tool_call>call:find{at:{x:}}<tool_call|>", [{"at": {"x": None}}], ""),
        ("pythonic", "[find(text='a' oops)", [{"text": "a"}], "oops)"),
        ("pythonic", "[find(text=)]", [{"text": None}], ")]"),
        ("pythonic", "[find(any=(1, ('a' oops", [{"any": [1, "a"]}], "oops"),
        ("pythonic", "[find(any=((1, {'a': ( }", [{"any": [1, {"a": None}]}], "}"),
        ("pythonic", f"[find(any={'(' * 33}", [{"any": None}], "("),
    ],
)
def test_a_malformed_call_ends_with_valid_arguments(form: str, text: str, calls: list[object], content: str) -> None:
    reply = parsed(form, text)
    assert [json.loads(arguments) for _, arguments in reply.calls] == calls
    assert reply.num_ended == len(calls)
    assert reply.content == content


def test_texts_are_streamed_and_numbers_arrive_whole() -> None:
    parser = formats("glm45").parser("auto", NAMES)
    parser.push("<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>The")
    assert [event.text for event in parser.push("a ")] == ["a "]  # type: ignore[union-attr]
    assert [event.text for event in parser.push('"b')] == ['\\"b']  # type: ignore[union-attr]
    parser.push("</arg_value><arg_key>n</arg_key><arg_value>1")
    assert parser.push("1") == parser.push("2") == []
    assert [event.text for event in parser.push("</arg_value>")] == ["112"]  # type: ignore[union-attr]


def test_kimis_ids_are_those_that_the_model_wrote() -> None:
    parser = formats("kimi_k2").parser("auto", NAMES)
    begun = [event for event in parser.push(kimi(("find", "{}"), ("now", "{}"))) if isinstance(event, CallBegun)]
    assert [(event.name, event.id) for event in begun] == [("find", "functions.find:0"), ("now", "functions.now:1")]
