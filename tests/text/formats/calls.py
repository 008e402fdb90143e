"""Calls as each format writes them, and what they mean."""

import ast
import json
from collections.abc import Iterator

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


def muse(name: str, **values: str) -> str:
    """The message of a call, from behind `<|start|>assistant`, without its end."""
    each = (f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items())
    called = (
        f'<atem:function_calls>\n<atem:invoke name="{name}">\n{"".join(each)}</atem:invoke>\n</atem:function_calls>'
    )
    return f" to={name}<|message|>{called}"


MUSE_NEXT = "<|eom|><|start|>assistant"


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
    "muse_glimmer": [
        (f"{muse('find', text=TEXT, n='5')}<|eot|>", "", [("find", {"text": TEXT, "n": 5})]),
        (f"{muse('now')}{MUSE_NEXT}{muse('add_2', xs='[1]')}<|eot|>", "", [("now", {}), ("add_2", {"xs": [1]})]),
        (f" to=user<|message|>I look.{MUSE_NEXT}{muse('now')}<|eot|>", "I look.", [("now", {})]),
        (f"{muse('now')}{MUSE_NEXT} to=user<|message|>Yes.<|eot|>", "Yes.", [("now", {})]),
        (muse("find", text="a</atem:parameter> b "), "", [("find", {"text": "a</atem:parameter> b "})]),
        # several calls in a message, and to a namespace
        (
            " to=tools.find<|message|><atem:function_calls>\n"
            '<atem:invoke name="find">\n<atem:parameter name="n">1</atem:parameter>\n</atem:invoke>\n'
            '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>',
            "",
            [("find", {"n": 1}), ("now", {})],
        ),
        # a message's end without the ends of the call, of the value, of the name of a parameter
        (
            muse("find", text="a", n="5").removesuffix("</atem:invoke>\n</atem:function_calls>")
            + MUSE_NEXT
            + muse("now"),
            "",
            [("find", {"text": "a", "n": 5}), ("now", {})],
        ),
        (
            f"{muse('find', text='a').partition('</')[0]}{MUSE_NEXT}{muse('now')}",
            "",
            [("find", {"text": "a"}), ("now", {})],
        ),
        (
            f"{muse('find', n='1', text='').partition('text')[0]}{MUSE_NEXT}{muse('now')}",
            "",
            [("find", {"n": 1}), ("now", {})],
        ),
        # no calls
        (f" to=find<|message|>oops{MUSE_NEXT} to=user<|message|>So.<|eot|>", "oops\nSo.", []),
        ("<|message|>Yes.<|eot|>", "Yes.", []),
        (' to=user<|message|>Write <atem:invoke name="now">.<|eot|>', 'Write <atem:invoke name="now">.', []),
        (" to=5 is it", " to=5 is it", []),
        (" to=user", "", []),
        (" to=user<|mess", "", []),
        ("Plain text", "Plain text", []),
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
    "apertus": [
        (
            f'<|tools_prefix|>[{{"find": {FIND}}}, {{"now": {{}}}}]<|tools_suffix|>',
            "",
            [("find", json.loads(FIND)), ("now", {})],
        ),
        ('Hm. <|tools_prefix|>[ { "now" : {} } ]', "Hm.", [("now", {})]),
        ('<|tools_prefix|>{"now": {}}<|tools_suffix|>.', ".", [("now", {})]),
        ('<|tools_prefix|>[{"now": {}]<|tools_suffix|>', "", [("now", {})]),  # a brace too few
        ('<|tools_prefix|>[{"fi\\u006ed": {"n": 1}}]<|tools_suffix|>', "", [("find", {"n": 1})]),
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
    "lfm2": [
        (
            '<|tool_call_start|>[find(text="a", n=5), now()]<|tool_call_end|>',
            "",
            [("find", {"text": "a", "n": 5}), ("now", {})],
        ),
        ("So <|tool_call_start|>[find(text='a')]<|tool_call_end|>.", "So.", [("find", {"text": "a"})]),
        ("[now()]", "[now()]", []),
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
        ("to=5 is it", "to=5 is it", []),
        (f"to=5 {'is it ' * 200}", f"to=5 {'is it ' * 200}", []),
        ("to=functions.now<|channel|>comment", "", []),
        ("Plain text", "Plain text", []),
    ],
}
EACH = [(name, text, content, calls) for name, cases in CALLS.items() for text, content, calls in cases]
