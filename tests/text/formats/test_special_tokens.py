"""Special tokens are known by their ids: the same characters written with ordinary tokens are text.

Every format whose marks may be special tokens reads replies whose reasoning, content and arguments spell all special
tokens of the model.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence

import llguidance
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.special_spans import packed
from tests.stages.detokenize.vocabularies import byte_ids
from tests.text.formats.calls import DS, KIMI
from tests.text.formats.replies import NAMES, REASONING, TOOLS, Reply, formats, joined, spans_of, specials_of
from tests.text.formats.test_grammars import SPECIALS, WORDS, Vocabulary

ALL_CASES = bool(os.environ.get("PIPELINE_ALL_CASES"))
OTHERS = ("<s>", "</s>", "<pad>", "<mask>", "<filename>", "<|im_end|>", "[INST]")
"""Special tokens of models that are no marks"""
END = "</s>"


class Spelled(str):
    """Text that is written with ordinary tokens."""

    __slots__ = ()


Part = str | Spelled
"""A string is written as a model does, with special tokens where it has them."""
Writer = Callable[[str], list[Part]]


def is_token(mark: str) -> bool:
    return re.fullmatch(r"<.+>|\[.+\]", mark) is not None


def form_of(tools: str | None, reasoning: str | None) -> ChatFormats:
    """Formats of a model whose marks are special tokens."""
    form = formats(tools, reasoning)
    marks = (*(form.tools.marks if form.tools else ()), *(form.reasoning.marks if form.reasoning else ()))
    return formats(tools, reasoning, tuple(dict.fromkeys((*filter(is_token, marks), *OTHERS))))


def written(form: ChatFormats, parts: Sequence[Part]) -> tuple[str, list[tuple[int, int, int]]]:
    """The text of a reply, and the spans of its special tokens."""
    text, spans = "", []
    for part in parts:
        if not isinstance(part, Spelled):
            spans += [(len(text) + at, num, token_id) for at, num, token_id in spans_of(part, specials_of(form))]
        text += part
    return text, spans


def read(
    form: ChatFormats, parts: Sequence[Part], cuts: Sequence[int], *, shows_specials: bool = False, tail: str = ""
) -> Reply:
    """Parse a reply that arrives in pieces. A span comes with the first character of its token."""
    text, spans = written(form, parts)
    parser = form.parser("auto" if form.tools else "none", NAMES, tail, shows_specials=shows_specials)
    events = []
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        sent = [packed(*span) for span in spans if begin <= span[0] < end]
        events += parser.push(text[begin:end], b"".join(sent))
    return joined([*events, *parser.finish()])


def check(
    form: ChatFormats, parts: Sequence[Part], expected: Reply, *, shows_specials: bool = False, tail: str = ""
) -> None:
    """Fail unless the reply is read so as a whole, in characters, and in two pieces, wherever it is cut."""
    text, _ = written(form, parts)
    some = range(1, len(text)) if ALL_CASES else range(1, len(text), 1 + len(text) // 4)
    for cuts in ([], range(1, len(text)), *([cut] for cut in some)):
        assert read(form, parts, cuts, shows_specials=shows_specials, tail=tail) == expected, cuts


# ----------------------------------------------------------------------------------------------------------- replies


def in_json(text: str) -> list[Part]:
    return ['{"text": "', Spelled(json.dumps(text, ensure_ascii=False)[1:-1]), '"}']


def quoted(text: str) -> Spelled:
    return Spelled(json.dumps(text, ensure_ascii=False))


CALLS: dict[str, list[Writer]] = {
    "deepseek_v31": [lambda text: [f"{DS[0]}{DS[1]}find{DS[2]}", *in_json(text), f"{DS[3]}{DS[4]}"]],
    "deepseek_v3": [
        lambda text: [f"{DS[0]}{DS[1]}function{DS[2]}find\n```json\n", *in_json(text), f"\n```{DS[3]}{DS[4]}"]
    ],
    "kimi_k2": [lambda text: [f"{KIMI[0]}{KIMI[1]}functions.find:0{KIMI[2]}", *in_json(text), f"{KIMI[3]}{KIMI[4]}"]],
    "granite": [
        lambda text: ['<|tool_call|>[{"name": "find", "arguments": ', *in_json(text), "}]"],
        lambda text: ['<tool_call>[{"name": "find", "arguments": ', *in_json(text), "}]</tool_call>"],
    ],
    "phi4_mini_json": [lambda text: ['<|tool_call|>{"name": "find", "arguments": ', *in_json(text), "}<|/tool_call|>"]],
    "glm45": [
        lambda text: [
            *("<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>", Spelled(text)),
            "</arg_value>\n</tool_call>",
        ]
    ],
    "qwen3_coder": [
        lambda text: [
            *("<tool_call>\n<function=find>\n<parameter=text>\n", Spelled(text)),
            "\n</parameter>\n</function>\n</tool_call>",
        ],
        lambda text: ["<tool_call>\n<function=find>\n", *in_json(text), "\n</function>\n</tool_call>"],
    ],
    "seed_oss": [
        lambda text: [
            *("<seed:tool_call>\n<function=find>\n<parameter=text>", Spelled(text)),
            "</parameter>\n</function>\n</seed:tool_call>",
        ],
        lambda text: ["<seed:tool_call>\n<function=find>\n", *in_json(text), "\n</function>\n</seed:tool_call>"],
    ],
    "gemma4": [
        lambda text: ['<|tool_call>call:find{text:<|"|>', Spelled(text), '<|"|>}<tool_call|>'],
        lambda text: ['<|tool_call>call:find{"text":', quoted(text), "}<tool_call|>"],
    ],
    "muse_glimmer": [
        lambda text: [
            ' to=find<|message|><atem:function_calls>\n<atem:invoke name="find">\n<atem:parameter name="text">',
            *(Spelled(text), "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"),
        ],
        lambda text: [
            ' to=find<|message|><atem:function_calls>\n<atem:invoke name="find">\n',
            *(*in_json(text), "\n</atem:invoke>\n</atem:function_calls><|eot|>"),
        ],
    ],
    "apertus": [lambda text: ['<|tools_prefix|>[{"find": ', *in_json(text), "}]<|tools_suffix|>"]],
    "functiongemma": [
        lambda text: [
            *("<start_function_call>call:find{text:<escape>", Spelled(text)),
            "<escape>}<end_function_call>",
        ],
        lambda text: ['<start_function_call>call:find{"text":', quoted(text), "}<end_function_call>"],
    ],
    "pythonic": [lambda text: ["<|python_start|>[find(text=", quoted(text), ")]<|python_end|>"]],
    "lfm2": [lambda text: ["<|tool_call_start|>[find(text=", quoted(text), ")]<|tool_call_end|>"]],
    "olmo3": [lambda text: ["<function_calls>find(text=", quoted(text), ")</function_calls>"]],
    "hermes": [lambda text: ['<tool_call>\n{"name": "find", "arguments": ', *in_json(text), "}\n</tool_call>"]],
    "generic": [lambda text: ['<tool_call>\n{"name": "find", "arguments": ', *in_json(text), "}\n</tool_call>"]],
    "llama3": [lambda text: ['<|python_tag|>{"name": "find", "parameters": ', *in_json(text), "}"]],
    "mistral": [
        lambda text: ['[TOOL_CALLS] [{"name": "find", "arguments": ', *in_json(text), "}]"],
        lambda text: ["[TOOL_CALLS]find[ARGS]", *in_json(text)],
        lambda text: ["[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]", *in_json(text)],
    ],
    "glm4": [lambda text: ["\nfind\n", *in_json(text)]],
    "openai": [
        lambda text: [
            "<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>",
            *in_json(text),
            "<|call|>",
        ]
    ],
}
"""How each format writes a call of find whose argument is a text"""


def thinking(name: str, thought: str) -> list[Part]:
    form = REASONING[name]
    return [form.start, Spelled(thought), form.end, "" if form.messages is not None else "\n\n"]


def spelling(form: ChatFormats) -> str:
    """A text with all special tokens of a model, and some that begin and don't end."""
    return "Of " + " and ".join((*specials_of(form), "<", "</", "[", *(one[:-1] for one in specials_of(form)))) + " so"


def test_every_format_is_tested() -> None:
    assert CALLS.keys() == TOOLS.keys()


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in CALLS.items() for way in range(len(ways))])
@pytest.mark.parametrize("shows_specials", [False, True])
def test_spelled_special_tokens_in_content_and_arguments_are_text(name: str, way: int, shows_specials: bool) -> None:
    form = form_of(name, None)
    assert form.needs_specials("auto")
    text = spelling(form)
    call = CALLS[name][way](text)
    said: list[Part] = {
        "glm4": [],
        "openai": ["<|channel|>commentary<|message|>", Spelled(text), "<|end|>"],
        "muse_glimmer": [" to=user<|message|>", Spelled(text), "<|eom|><|start|>assistant"],
    }.get(name, [Spelled(text)])
    found = read(form, [*said, *call], [], shows_specials=shows_specials)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("find", {"text": text})]
    assert found.content == (text if said else "")
    assert found.num_ended == 1
    check(form, [*said, *call], found, shows_specials=shows_specials)


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"glm4", "qwen3_coder", "seed_oss"}))
def test_a_reply_that_only_spells_calls_and_reasoning_is_content(name: str) -> None:
    """GLM-4's calls need no mark. In those of Qwen 3 Coder and Seed-OSS, `<function=` is one, and it is no token."""
    reasoning = {"openai": "openai_gptoss", "muse_glimmer": "muse_glimmer"}.get(name, "mistral")
    form = form_of(name, reasoning)
    for way in CALLS[name]:
        text = "".join([*thinking(reasoning, "Hm."), *way("a")])
        check(form, [Spelled(text)], Reply(text))


@pytest.mark.parametrize("name", [name for name in REASONING if is_token(form_of(None, name).reasoning.end)])  # type: ignore[union-attr]
@pytest.mark.parametrize("shows_specials", [False, True])
def test_spelled_special_tokens_in_reasoning_are_text(name: str, shows_specials: bool) -> None:
    form = form_of(None, name)
    assert form.needs_specials("none")
    text = spelling(form)
    answer: list[Part] = [Spelled(text)]
    if (messages := REASONING[name].messages) is not None:
        answer = [messages.begin + messages.answer, *answer]
    check(form, [*thinking(name, text), *answer], Reply(text, text), shows_specials=shows_specials)


def test_all_parts_of_a_reply_together() -> None:
    for name, reasoning in (("mistral", "mistral"), ("gemma4", "gemma4"), ("glm45", "glm45"), ("seed_oss", "seed_oss")):
        form = form_of(name, reasoning)
        text = spelling(form)
        parts = [*thinking(reasoning, text), Spelled(text), *CALLS[name][-1](text)]
        found = read(form, parts, [])
        assert (found.content, found.reasoning) == (text, text)
        assert [json.loads(arguments) for _, arguments in found.calls] == [{"text": text}]
        check(form, parts, found)


def test_special_tokens_are_shown_only_if_the_client_asks_for_them() -> None:
    form = form_of("mistral", "mistral")
    parts: list[Part] = [
        *("[THINK]Hm", END, ".[THINK][ARGS]", Spelled(END), "[/THINK]", "Yes", END, Spelled(END), "[CALL_ID]."),
        *('[TOOL_CALLS]find[ARGS]{"text": "a', END, Spelled(END), "[THINK]", '"}'),
    ]
    check(form, parts, Reply("Yes</s>.", "Hm.</s>", [("find", '{"text": "a</s>"}')], 1))
    shown = Reply("Yes</s></s>[CALL_ID].", "Hm</s>.[THINK][ARGS]</s>", [("find", '{"text": "a</s></s>[THINK]"}')], 1)
    check(form, parts, shown, shows_specials=True)
    quote = form_of("gemma4", None)
    parts = ['<|tool_call>call:find{"text":"a<|"|>b"}<tool_call|>']
    check(quote, parts, Reply("", "", [("find", '{"text": "ab"}')], 1))
    check(quote, parts, Reply("", "", [("find", r'{"text": "a<|\"|>b"}')], 1), shows_specials=True)


def test_a_special_token_that_a_stop_string_has_cut_is_not_shown() -> None:
    form = form_of("mistral", "mistral")
    parser = form.parser("auto", NAMES, "")
    assert joined([*parser.push("Yes[/TH", packed(3, 8, form.added["[/THINK]"].id)), *parser.finish()]) == Reply("Yes")
    parser = form.parser("auto", NAMES, "", shows_specials=True)
    shown = joined([*parser.push("Yes[/TH", packed(3, 8, form.added["[/THINK]"].id)), *parser.finish()])
    assert shown == Reply("Yes[/TH")


def test_a_mark_is_known_by_its_id_if_the_decoder_changes_its_text_and_otherwise_by_both() -> None:
    """For decoders that write a space for `▁`; and for files with ids that the tokenizer does not use."""
    form = form_of("deepseek_v31", None)
    call = f"{DS[0]}{DS[1]}now{DS[2]}{{}}{DS[3]}{DS[4]}"
    for text, moved in ((call.replace("▁", " "), 0), (call, 1000)):
        spans = [(at, num, moved + token_id) for at, num, token_id in spans_of(call, specials_of(form))]
        parser = form.parser("auto", NAMES, "")
        events = parser.push(text, b"".join(packed(*span) for span in spans))
        assert joined([*events, *parser.finish()]) == Reply(calls=[("now", "{}")], num_ended=1)


def test_marks_that_are_ordinary_tokens_are_found_in_the_text() -> None:
    form = formats("hermes", "qwen3", OTHERS)
    assert not form.needs_specials("auto")
    parts = ["<think>Hm.</think>", *CALLS["hermes"][0]("a <s>")]
    check(form, [Spelled("".join(parts))], Reply("", "Hm.", [("find", '{"text": "a <s>"}')], 1))


# ---------------------------------------------------------------------------------------------------------- grammars


VOCABULARY = Vocabulary((*SPECIALS, *OTHERS), WORDS)
BYTES = byte_ids(VOCABULARY.tokenizer)
OPTIONAL = {
    "openai": ("<|start|>assistant", "<|call|>"),
    "muse_glimmer": ("<|eot|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "llama3": ("<|python_tag|>",),
}
"""Marks that a required call does not have"""


def required(name: str, parts: Sequence[Part], key: str) -> list[Part]:
    """A required call whose argument has this name."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Spelled):
            found.append(part)
            continue
        for mark in OPTIONAL.get(name, ()):
            part = part.replace(mark, "")
        before, _, behind = part.partition("text")
        found += [before, Spelled(key), behind] if behind else [part]
    return found


def is_taken(grammar: str, parts: Sequence[Part]) -> bool:
    """Whether a grammar allows these ids: text that is spelled is written with a token for each byte."""
    matcher = llguidance.LLMatcher(VOCABULARY.guide, grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids: list[int] = []
    for part in parts:
        is_spelled = isinstance(part, Spelled)
        ids += [BYTES[byte] for byte in part.encode()] if is_spelled else VOCABULARY.tokenizer.encode(part).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, "text") for name in CALLS] + [(name, "<s>") for name in CALLS if name not in ("pythonic", "lfm2", "olmo3")],
)
@pytest.mark.parametrize("is_enum", [True, False])
def test_grammars_require_marks_as_tokens_and_take_their_spelling_as_text(name: str, key: str, is_enum: bool) -> None:
    template = "<|tool_call|>" if name == "phi4_mini_json" else ""
    form = ChatFormats(TOOLS[name], template=template, added=VOCABULARY.added)
    marks = [mark for mark in TOOLS[name].marks if mark in VOCABULARY.added and VOCABULARY.added[mark].special]
    text = f"Of {' and '.join((*marks, *OTHERS))} so"
    value = {"enum": [text, "b"]} if is_enum else {"type": "string"}
    parameters = {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
    function = {"name": "find", "parameters": parameters, "strict": True}
    tools = json.dumps([{"type": "function", "function": function}])
    grammar = form.calls("required", "", tools, parallel=False).lark()
    taken = [parts for way in CALLS[name] if is_taken(grammar, parts := required(name, way(text), key))]
    assert taken, grammar
    for parts in taken:
        reply = read(form, parts, [])
        assert [json.loads(arguments) for _, arguments in reply.calls] == [{key: text}]
        if any(mark in part for part in parts for mark in marks if not isinstance(part, Spelled)):
            assert not is_taken(grammar, [Spelled("".join(parts))])
    strict = form.strict_calls(tools, parallel=False)
    if strict is not None and name not in ("openai", "glm4"):
        said: list[Part] = [" to=user<|message|>"] if name == "muse_glimmer" else []
        assert is_taken(strict.lark(), [*said, Spelled(text)])


# ---------------------------------------------------------------------------------------------------------- any reply

BITS = ("a", " ", "\n", "{", "}", '"', "\\", "find", "call:find{text:", '{"text": "', "<", "[", ":", "functions.find:0")


@settings(max_examples=2000 if ALL_CASES else 40, deadline=None)
@given(
    tools=st.sampled_from([None, *TOOLS]),
    reasoning=st.sampled_from([None, *REASONING]),
    shows_specials=st.booleans(),
    data=st.data(),
)
def test_a_reply_does_not_depend_on_where_it_is_cut(
    tools: str | None, reasoning: str | None, shows_specials: bool, data: st.DataObject
) -> None:
    """And nothing is left of what parsers read instead of marks."""
    form = form_of(tools, reasoning)
    texts = [*specials_of(form), *BITS]
    part = st.sampled_from([*texts, *map(Spelled, texts), *(Spelled(one[: len(one) // 2]) for one in texts)])
    parts = data.draw(st.lists(part, max_size=16))
    text, _ = written(form, parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = read(form, parts, [], shows_specials=shows_specials)
    assert read(form, parts, cuts, shows_specials=shows_specials) == whole
    assert read(form, parts, range(1, len(text)), shows_specials=shows_specials) == whole
    msgspec.json.encode(whole)
