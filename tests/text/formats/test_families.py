"""Replies of model families with formats of their own: valid, malformed and cut, in any pieces."""

import ast
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text.formats.parsing.events import CallBegun
from pipeline.text.formats.tool_parsers.harmony import MARKS as HARMONY
from tests.text.formats.replies import NAMES, TOOLS, Reply, formats, parsed, read, specials_of

DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
)
TEXT = 'a "b"\n\\é💥 {x}'
"""A text with what needs an escape, or looks like syntax"""
CODE = "if x < 1:\n    <b>"

PYTHON_STRINGS = {
    text: ast.literal_eval(f"({text})".replace("f'", "'"))
    for text in (
        '""',
        "''",
        '"""a\n"b" \'\'\' ""\\""""',
        "'''a''b\\n'''",
        '""""""',
        "'a' \"b\"\n'c'",
        "'' ''",
        "('a'\n 'b')",
        "(('a'))",
        "r'\\d\\\\ \\' x'",
        "R'''\\d'''",
        "u'a' r'\\n' '\\n'",
        "f'a {b}' 'c'",
    )
}
PYTHON_TUPLES = {
    text: json.loads(json.dumps(ast.literal_eval(text)))
    for text in (
        "()",
        "(1,)",
        "(1, 'a', (2, 3))",
        "[(1, 2), ('a' 'b', None)]",
        "{'a': (1, [True]), 'b': ((), ((1)))}",
        "(((1, 2)))",
        "({'a': 1}, )",
    )
}


def python_calls() -> Iterator[tuple[str, str, list[tuple[str, object]]]]:
    for text, value in PYTHON_STRINGS.items():
        yield f"[find(text={text}, n=5, any={text})]", "", [("find", {"text": value, "n": 5, "any": value})]
    for text, value in PYTHON_TUPLES.items():
        yield f"[find(any={text}, n=5), now()]", "", [("find", {"any": value, "n": 5}), ("now", {})]


def v31(*calls: tuple[str, str]) -> str:
    return DS[0] + "".join(f"{DS[1]}{name}{DS[2]}{arguments}{DS[3]}" for name, arguments in calls) + DS[4]


def v3(*calls: tuple[str, str]) -> str:
    each = (f"{DS[1]}function{DS[2]}{name}\n```json\n{arguments}\n```{DS[3]}" for name, arguments in calls)
    return DS[0] + "\n".join(each) + DS[4]


def kimi(*calls: tuple[str, str]) -> str:
    each = (f"{KIMI[1]}functions.{name}:{i}{KIMI[2]}{arguments}{KIMI[3]}" for i, (name, arguments) in enumerate(calls))
    return KIMI[0] + "".join(each) + KIMI[4]


def glm(name: str, **values: str) -> str:
    each = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{''.join(each)}</tool_call>"


def qwen(name: str, **values: str) -> str:
    each = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{''.join(each)}</function>\n</tool_call>"


def seed(name: str, **values: str) -> str:
    each = (f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{''.join(each)}</function>\n</seed:tool_call>"


def gemma(inside: str, name: str = "find") -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


FIND = json.dumps({"text": TEXT, "n": 5}, ensure_ascii=False)
CALLS: dict[str, list[tuple[str, str, list[tuple[str, object]]]]] = {
    "deepseek_v31": [
        (v31(("find", FIND)), "", [("find", {"text": TEXT, "n": 5})]),
        (f"Well.\n\n{v31(('now', '{}'), ('find', FIND))}", "Well.", [("now", {}), ("find", json.loads(FIND))]),
        (f"{DS[1]}now{DS[2]}{{}}{DS[3]} and", " and", [("now", {})]),  # no section
    ],
    "deepseek_v3": [
        (v3(("find", FIND), ("now", "{}")), "", [("find", json.loads(FIND)), ("now", {})]),
        (v31(("now", "{}")), "", [("now", {})]),
    ],
    "kimi_k2": [
        (kimi(("find", FIND), ("now", "{}")), "", [("find", json.loads(FIND)), ("now", {})]),
        (f"Hm. {kimi(('now', '{}'))}", "Hm.", [("now", {})]),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "find", "arguments": {FIND}}}]', "", [("find", json.loads(FIND))]),
        (
            '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "add_2", "arguments": {"xs": [1]}}]',
            "",
            [("now", {}), ("add_2", {"xs": [1]})],
        ),
        ('So. <tool_call>[{"name": "now", "arguments": {}}]', "So.", [("now", {})]),
        ('<|tool_call|>{"name": "now", "arguments": {}}', "", [("now", {})]),
    ],
    "phi4_mini_json": [
        (
            f'functools[{{"name": "find", "arguments": {FIND}}}, {{"name": "now", "arguments": {{}}}}]',
            "",
            [("find", json.loads(FIND)), ("now", {})],
        ),
        ('<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', "", [("now", {})]),
        ('<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|> Yes', " Yes", [("now", {})]),
        ("functools are fine", "functools are fine", []),
    ],
    "glm45": [
        (glm("find", text=TEXT, n="5"), "", [("find", {"text": TEXT, "n": 5})]),
        (glm("find", text="5", n="five", all="true"), "", [("find", {"text": "5", "n": "five", "all": True})]),
        (glm("find", at='{"x": [1, null]}', any="1.50"), "", [("find", {"at": {"x": [1, None]}, "any": 1.5})]),
        (glm("find", any="yes", other="[1]", text=""), "", [("find", {"any": "yes", "other": [1], "text": ""})]),
        (f"Well.\n{glm('now')}\n{glm('find', n='1')}", "Well.", [("now", {}), ("find", {"n": 1})]),
        ("<tool_call>now</tool_call>", "", [("now", {})]),
        # without the tag that ends a value
        (
            glm("find", text="a", n="5").replace("</arg_value>", ""),
            "",
            [("find", {"text": "a", "n": 5})],
        ),
        (
            f"{glm('find', text='a').replace('</arg_value>', '')}\n{glm('now')}",
            "",
            [("find", {"text": "a"}), ("now", {})],
        ),
        (glm("add_2", xs="['a', {'b': True}]"), "", [("add_2", {"xs": ["a", {"b": True}]})]),
        (
            "<tool_call>find<arg_key>n</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>"
            "</tool_call>.",
            ".",
            [("find", {"n": 1})],
        ),
        ('<tool_call>find\n{"n": 1}\n</tool_call>', "", [("find", {"n": 1})]),
    ],
    "qwen3_coder": [
        (qwen("find", text=TEXT, n="5"), "", [("find", {"text": TEXT, "n": 5})]),
        # without the tag that ends a value, and without those behind it
        (
            qwen("find", text="a\n", n="5", any="x").replace("</parameter>\n", ""),
            "",
            [("find", {"text": "a\n", "n": 5, "any": "x"})],
        ),
        ("<tool_call><function=find><parameter=n>5<parameter=text>a</function>", "", [("find", {"n": 5, "text": "a"})]),
        ("<tool_call><function=find><parameter=text>a</tool_call>", "", [("find", {"text": "a"})]),
        (
            "<function=find><parameter=text>a\n</function>\n<function=now></function>",
            "",
            [("find", {"text": "a"}), ("now", {})],
        ),
        ("<function=now>\n<parameter=x>\n1\n<parameter=y>\n2\n</function>", "", [("now", {"x": 1, "y": 2})]),
        (qwen("find", text="\n a\n"), "", [("find", {"text": "\n a\n"})]),
        (
            f"So:\n{qwen('now')}\n{qwen('add_2', xs='[1, 2]', code=CODE)}",
            "So:",
            [("now", {}), ("add_2", {"xs": [1, 2], "code": CODE})],
        ),
        ("<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
        ("<function=find><parameter=n>7</parameter></function>", "", [("find", {"n": 7})]),
    ],
    "seed_oss": [
        (seed("find", text=TEXT, n="5"), "", [("find", {"text": TEXT, "n": 5})]),
        (f"{seed('now')}\n{seed('now')}", "", [("now", {}), ("now", {})]),
    ],
    "gemma4": [
        ("<|tool_call>call:google:mcp:find{n:5}<tool_call|>", "", [("find", {"n": 5})]),
        (gemma(f'text:<|"|>{TEXT}<|"|>,n:5'), "", [("find", {"text": TEXT, "n": 5})]),
        (
            gemma('at:{x:1.5,y:{z:[<|"|>a,}<|"|>,true,null]}},all:false'),
            "",
            [("find", {"at": {"x": 1.5, "y": {"z": ["a,}", True, None]}}, "all": False})],
        ),
        (f"Hm.{gemma('', 'now')}{gemma('n:1')}", "Hm.", [("now", {}), ("find", {"n": 1})]),
        (gemma('"text": "a\\n", "n": 5'), "", [("find", {"text": "a\n", "n": 5})]),  # JSON
        (gemma('n:<|"|>5<|"|>,text:12'), "", [("find", {"n": 5, "text": "12"})]),  # by the schema
    ],
    "functiongemma": [
        (
            "<start_function_call>call:find{text:<escape>a<b<escape>,n:5}<end_function_call>",
            "",
            [("find", {"text": "a<b", "n": 5})],
        ),
        (
            "<start_function_call>call:now{}<end_function_call><start_function_call>call:now{}<end_function_call>",
            "",
            [("now", {}), ("now", {})],
        ),
    ],
    "pythonic": [
        (
            "[find(text='a \\'b\\'\\n\\x41\\u00e9', n=5), now()]",
            "",
            [("find", {"text": "a 'b'\nAé", "n": 5}), ("now", {})],
        ),
        ('[find(at={"x": [1, (2)]}, all=True)]', "", [("find", {"at": {"x": [1, 2]}, "all": True})]),
        *python_calls(),
        ("[find(text=(5), n=('5'))]", "", [("find", {"text": "5", "n": 5})]),
        ("[find(text='a' f='b' n='5')]", "", [("find", {"text": "a", "f": "b", "n": 5})]),
        (
            '[find(at={"x": [1, {}]}, all=True, any=None)]',
            "",
            [("find", {"at": {"x": [1, {}]}, "all": True, "any": None})],
        ),
        ("<|python_start|>[other(a=1)]<|python_end|> So", " So", [("other", {"a": 1})]),
        ('[find(**{"n": 5})]', "", [("find", {"n": 5})]),
        ("[other()]", "[other()]", []),
        ("[now](https://example.org)", "[now](https://example.org)", []),
        ("[1, 2]", "[1, 2]", []),
    ],
    "olmo3": [
        (
            '<function_calls>find(text="a", n=5)\nnow()</function_calls>',
            "",
            [("find", {"text": "a", "n": 5}), ("now", {})],
        ),
        ("So <function_calls>now()</function_calls>.", "So.", [("now", {})]),
    ],
    "glm4": [
        (f"\nfind\n{FIND}", "", [("find", json.loads(FIND))]),
        ("now\n{}<|assistant|>\nfind\n{}", "", [("now", {}), ("find", {})]),
        ("now is the time", "now is the time", []),
        ("Paris", "Paris", []),
    ],
    "openai": [
        (
            '<|channel|>commentary to=find <|constrain|>json<|message|>{"text": "a"}<|call|>',
            "",
            [("find", {"text": "a"})],
        ),
        ("<|channel|>commentary to=lost<|message|>{}<|call|>", "{}", []),
        (
            f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{FIND}<|call|>",
            "",
            [("find", json.loads(FIND))],
        ),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [("now", {})]),
        ("<|channel|>final<|message|>Yes.<|return|>", "Yes.", []),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
            "<|constrain|>json<|message|>{}",
            "I look.",
            [("now", {})],
        ),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", "", [("now", {})]),
        ("<|channel|>commentary to=functions.now<|message|>oops<|end|>", "oops", []),
        ("Plain text", "Plain text", []),
    ],
}
EACH = [(name, text, content, calls) for name, cases in CALLS.items() for text, content, calls in cases]


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


# ------------------------------------------------------------------------------------------------------- reasoning

HIDDEN_GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<turn|>")


@pytest.mark.parametrize(
    ("form", "tail", "text", "reply"),
    [
        ("glm45", "<|assistant|>", "\n<think>Hm.</think>\nYes.", Reply("Yes.", "Hm.")),
        ("glm45", "<|assistant|>\n<think></think>", "\nYes.", Reply("\nYes.")),
        ("glm45", "<|assistant|></think>", "Yes.", Reply("Yes.")),
        ("glm45", "<|assistant|><think>", "Hm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("deepseek_v3", "<｜Assistant｜><think>", "Hm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("deepseek_v3", "<｜Assistant｜></think>", "Yes.", Reply("Yes.")),
        ("deepseek_v3", "<｜Assistant｜><think></think>", "Yes.", Reply("Yes.")),
        ("granite", "", "Here is my thought process: Hm.\nHere is my response: Yes.", Reply(" Yes.", " Hm.")),
        ("granite", "", "Here's my thought process:\nHm. Here's my response:\nYes.", Reply("Yes.", "Hm. ")),
        ("granite", "", "<think>Hm.</think>\n<response>Yes.</response>", Reply("Yes.", "Hm.")),
        ("granite", "", "Here is my answer. <response>", Reply("Here is my answer. <response>")),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", Reply("Yes.", "Hm.")),
        ("kimi_k2", "<|im_middle|>", "<think>Hm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.", Reply("Yes.", "Hm.")),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", Reply("Yes.")),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>Hm.", Reply("", "Hm.")),
        (
            "openai_gptoss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            Reply("Yes.", "Hm."),
        ),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>Y", "es.", Reply("es.")),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>H", "m.<|end|>", Reply("", "m.")),
    ],
)
def test_reasoning_is_separated_from_the_content(form: str, tail: str, text: str, reply: Reply) -> None:
    specials = {"gemma4": HIDDEN_GEMMA, "openai_gptoss": HARMONY}.get(form, ())
    for known in (formats(reasoning=form), formats(reasoning=form, specials=specials)):
        assert read(known.parser(tail=tail), [text]) == reply
        assert read(known.parser(tail=tail), text) == reply


def test_a_call_ends_kimis_reasoning() -> None:
    form = formats("kimi_k2", "kimi_k2", KIMI)
    reply = read(form.parser("auto", NAMES, "<|im_middle|>"), f"<think>I look.{kimi(('now', '{}'))}")
    assert reply == Reply("", "I look.", [("now", "{}")], 1)


def test_gpt_oss_reasons_again_before_a_call() -> None:
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Second.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>'
    )
    form = formats("openai", "openai_gptoss", HARMONY)
    expected = Reply("I look.", "First.\nSecond.", [("find", '{"n": 1}')], 1)
    assert read(form.parser("auto", NAMES, "<|start|>assistant"), [text]) == expected
    assert read(form.parser("auto", NAMES, "<|start|>assistant"), text) == expected
    # Without tools, a call is content. Without a reasoning parser, so is the reasoning.
    assert read(form.parser("none", (), "<|start|>assistant"), text).content == 'I look.\n{"n": 1}'
    plain = formats("openai", specials=HARMONY)
    assert read(plain.parser("auto", NAMES), text) == Reply("First.\nI look.\nSecond.", "", [("find", '{"n": 1}')], 1)


def test_special_tokens_of_gpt_oss_and_gemma_are_not_shown() -> None:
    gpt_oss = formats("openai", "openai_gptoss", (*HARMONY, "<|endoftext|>"))
    assert gpt_oss.needs_specials("none")
    text = "<|channel|>final<|message|>Yes.<|endoftext|><|return|>"
    assert read(gpt_oss.parser("none", tail="<|start|>assistant"), text, specials_of(gpt_oss)) == Reply("Yes.")
    gemma4 = formats("gemma4", "gemma4", HIDDEN_GEMMA)
    assert read(gemma4.parser("auto", NAMES, "model\n"), f"{gemma('n:1')}<|tool_response>") == Reply(
        calls=[("find", '{"n": 1}')], num_ended=1
    )


# -------------------------------------------------------------------------------------------------------- any text

PIECES = [
    *('{"name": "find", "arguments": ', '"text"', '"', "\\", "{", "}", "[", "]", "(", ")", ":", ",", "=", " ", "\n"),
    *(
        "find",
        "now",
        "call:",
        "functions.",
        "a",
        "é",
        "5",
        "null",
        "True",
        "text",
        "n",
        "<",
        "</",
        "```json",
        "function",
    ),
    *("text='a'", "**", "'", "\\x4", "\\u00e9", "to=", "assistant", "commentary", "final", "analysis"),
]
NATIVE = sorted(set(TOOLS) - {"generic"})


def texts(form: str) -> st.SearchStrategy[str]:
    extra = {
        "deepseek_v3": [v3(("find", FIND))],
        "deepseek_v31": [v31(("now", "{}"))],
        "kimi_k2": [kimi(("find", FIND))],
        "glm45": [
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<arg_key>n</arg_key>",
            glm("find", text=TEXT, n="5"),
        ],
        "qwen3_coder": [
            *("<function=find>", "<parameter=n>", "<parameter=text>", "<parameter=", "</parameter>", "</function>"),
            qwen("find", text="a", n="1"),
        ],
        "seed_oss": ["<function=", "<parameter=", "</parameter>", "</function>", seed("find", text="a")],
        "gemma4": [gemma('text:<|"|>a<|"|>,at:{x:[1,2]}')],
        "pythonic": ["[find(text='a', n=1), now()]", "[find(any=", "[find(any=('a' ", "(", ")", "'''", 'r"', "f'a'"],
        "openai": ["<|channel|>commentary to=functions.find<|message|>{}<|call|>", "<|end|><|start|>assistant"],
    }.get(form, [])
    marks = [*TOOLS[form].marks, *(mark[:4] for mark in TOOLS[form].marks), *extra]
    return st.lists(st.sampled_from([*PIECES, *marks, *marks]), max_size=20).map("".join)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("form", NATIVE)
def test_parsing_does_not_depend_on_where_the_text_is_split(form: str, data: st.DataObject) -> None:
    text = data.draw(texts(form))
    cuts = data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=8))
    reasoning = data.draw(st.sampled_from([None, "qwen3", "kimi_k2", "granite", "gemma4", "openai_gptoss"]))
    specials = data.draw(st.sampled_from([(), TOOLS[form].marks]))
    known = formats(form, reasoning, specials)
    whole = read(known.parser("auto", NAMES, ""), [text])
    indices = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(indices)]
    assert read(known.parser("auto", NAMES, ""), pieces) == whole
    assert read(known.parser("auto", NAMES, ""), text) == whole


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("form", NATIVE)
def test_calls_are_json_and_other_text_is_kept(form: str, data: st.DataObject) -> None:
    text = data.draw(texts(form))
    reply = parsed(form, text)
    for index, (_, arguments) in enumerate(reply.calls):
        if index < reply.num_ended and form in (
            "glm45",
            "qwen3_coder",
            "seed_oss",
            "gemma4",
            "functiongemma",
            "pythonic",
        ):
            json.loads(arguments)
    if not reply.calls and form != "openai":
        assert reply.content == text


HEADS = {
    "glm45": "<tool_call>find\n<arg_key>text</arg_key><arg_value>",
    "qwen3_coder": "<tool_call><function=find><parameter=text>",
    "gemma4": '<|tool_call>call:find{text:<|"|>',
    "pythonic": "[find(text='",
    "openai": "<|channel|>final<|message|>",
}


@pytest.mark.parametrize("form", [name for name in NATIVE if name not in ("hermes", "llama3", "mistral", "seed_oss")])
def test_parsing_takes_linear_time(form: str) -> None:
    known = formats(form, "qwen3", TOOLS[form].marks)

    def took_s(head: str, unit: str, num_chars: int) -> float:
        text = head + unit * (num_chars // len(unit))
        gc.disable()  # a collection of what other tests have left may take a second
        try:
            begin_s = time.process_time()
            read(known.parser("auto", NAMES), text)
            return time.process_time() - begin_s
        finally:
            gc.enable()

    for head, unit in itertools.product({"", HEADS.get(form, "")}, (TOOLS[form].marks[0], " ", "a", "{", "[", "\\")):
        small_s = took_s(head, unit, 1_000)
        assert took_s(head, unit, 8_000) < 8 * small_s * 4 + 0.1, (head, unit)
