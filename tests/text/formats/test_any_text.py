"""Any text: where it is split changes nothing, calls are JSON, other text is kept, and time is linear."""

import gc
import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.formats.calls import FIND, MUSE_NEXT, TEXT, gemma, glm, kimi, muse, qwen, seed, v3, v31
from tests.text.formats.replies import NAMES, TOOLS, formats, parsed, read

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
        "muse_glimmer": [
            *('<atem:invoke name="', '<atem:parameter name="', '">', "</atem:parameter>", "</atem:invoke>", MUSE_NEXT),
            *(muse("find", text="a", n="1"), " to=user<|message|>", " to=self<|message|>"),
        ],
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
    names = ("qwen3", "kimi_k2", "granite", "gemma4", "openai_gptoss", "muse_glimmer")
    reasoning = data.draw(st.sampled_from([None, *names]))
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
            "muse_glimmer",
            "gemma4",
            "functiongemma",
            "pythonic",
        ):
            json.loads(arguments)
    if not reply.calls and form not in ("openai", "muse_glimmer"):
        assert reply.content == text


HEADS = {
    "glm45": "<tool_call>find\n<arg_key>text</arg_key><arg_value>",
    "qwen3_coder": "<tool_call><function=find><parameter=text>",
    "gemma4": '<|tool_call>call:find{text:<|"|>',
    "pythonic": "[find(text='",
    "openai": "<|channel|>final<|message|>",
    "muse_glimmer": muse("find", text="").removesuffix("</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"),
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
