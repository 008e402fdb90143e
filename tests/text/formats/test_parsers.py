"""Parsing of replies that models write, valid and malformed."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slices import part_of
from tests.text.formats.replies import NAMES, Reply, formats, parsed, read, specials_of

HERMES = '<tool_call>\n{"name": "find", "arguments": {"text": "a}</tool_call>\\"", "n": [1, {}]}}\n</tool_call>'
FOUND = ("find", '{"text": "a}</tool_call>\\"", "n": [1, {}]}')


def calls(*each: tuple[str, str], content: str = "") -> Reply:
    return Reply(content=content, calls=list(each), num_ended=len(each))


# ------------------------------------------------------------------------------------------------- each format


@pytest.mark.parametrize(
    ("form", "text", "reply"),
    [
        ("hermes", HERMES, calls(FOUND)),
        ("hermes", f"Let me see.\n\n{HERMES}\n", calls(FOUND, content="Let me see.")),
        ("hermes", f"{HERMES}\n{HERMES}", calls(FOUND, FOUND)),
        ("hermes", f"{HERMES}\n\nDone. ", calls(FOUND, content="\n\nDone. ")),
        ("hermes", f"a {HERMES} b {HERMES} c", calls(FOUND, FOUND, content="a b c")),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', calls(("now", '{"a": 1}'))),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', calls(("now", "{}"))),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls(("now", "{}"))),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', calls(("now", '{"a": 1}'))),
        (
            "hermes",
            '<tool_call>{"id": 7, "name": "now", "parameters": {}, "x": [{}]}</tool_call>',
            calls(("now", "{}")),
        ),
        ("hermes", '<tool_call>{"name": "unheard-of", "arguments": {}}</tool_call>', calls(("unheard-of", "{}"))),
        ("llama3", '{"name": "find", "parameters": {"text": "ä"}}', calls(("find", '{"text": "ä"}'))),
        ("llama3", '\n{"type": "function", "name": "now", "parameters": {}}', calls(("now", "{}"))),
        ("llama3", '<|python_tag|>{"name": "x", "parameters": {"a": 1}}', calls(("x", '{"a": 1}'))),
        ("llama3", 'Well. <|python_tag|> {"name": "x", "parameters": {}}', calls(("x", "{}"), content="Well.")),
        (
            "llama3",
            '{"name": "now", "parameters": {}}; {"name": "find", "parameters": {"text": ";"}}',
            calls(("now", "{}"), ("find", '{"text": ";"}')),
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', calls(("now", "{}"))),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', calls(("now", "{}"))),
        (
            "mistral",
            'Well.[TOOL_CALLS] [{"name": "find", "arguments": {"text": "]"}}, {"name": "now", "arguments": {}}]\n',
            calls(("find", '{"text": "]"}'), ("now", "{}"), content="Well."),
        ),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"text": "[ARGS]"}', calls(("find", '{"text": "[ARGS]"}'))),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": 1}', calls(("now", '{"a": 1}'))),
        (
            "mistral",
            '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"a": 1}',
            calls(("now", "{}"), ("now", '{"a": 1}')),
        ),
        ("mistral", '[TOOL_CALLS]now{"a": 1}', calls(("now", '{"a": 1}'))),
    ],
)
def test_calls_are_parsed_from_real_output(form: str, text: str, reply: Reply) -> None:
    assert parsed(form, text) == reply


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "Plain words, with {braces} and <tool> marks.\n\n"),
        ("hermes", "a <tool_call"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\nfind the words\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "find", "argum'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name" "find"}</tool_call>'),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", " \n "),
        ("hermes", ""),
        ("llama3", '{"name": "Paris", "parameters": {}}'),
        ("llama3", '{"city": "Paris", "name": "find", "parameters": {}}'),
        ("llama3", 'It is {"name": "find", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", '{"name": "find", "param'),
        ("llama3", "  "),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS] find the words"),
        ("mistral", "[TOOL_CALLS]find[ARGS]none"),
        ("mistral", "[TOOL_CALLS]find[ARGS"),
        ("mistral", "[TOOL_CALLS]find[CALL_ID]abc"),
        ("mistral", "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]find[CALL_ID]" + "i" * 300 + "[ARGS]{}"),
        ("mistral", '[{"name": "find", "arguments": {}}]'),
    ],
)
def test_text_that_only_resembles_a_call_is_unchanged_content(form: str, text: str) -> None:
    assert parsed(form, text) == Reply(content=text)


@pytest.mark.parametrize(
    ("form", "text", "reply"),
    [
        # One brace too many, one too few, no end marker, garbage after the arguments.
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', calls(("now", "{}"))),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>ok', calls(("now", "{}"), content="ok")),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', calls(("now", "{}"))),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_', calls(("now", "{}"))),
        ("hermes", f'<tool_call>{{"name": "now", "arguments": {{}}}}{HERMES}', calls(("now", "{}"), FOUND)),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, oops', calls(("now", "{}"), content="oops")),
        ("hermes", f"<tool_call>what? {HERMES}", calls(FOUND, content="<tool_call>what?")),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, 5]', calls(("now", "{}"), content=", 5]")),
    ],
)
def test_mistakes_of_small_models_lose_as_little_as_possible(form: str, text: str, reply: Reply) -> None:
    assert parsed(form, text) == reply


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {"text": "half'),
        ("llama3", '{"name": "find", "parameters": {"text": "half'),
        ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {"text": "half'),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"text": "half'),
    ],
)
def test_a_truncated_call_keeps_its_arguments_so_far(form: str, text: str) -> None:
    assert parsed(form, text) == Reply(calls=[("find", '{"text": "half')], num_ended=0)


def test_arguments_are_streamed_unchanged() -> None:
    parser = formats("hermes").parser("auto", NAMES)
    assert parser.push('<tool_call>\n{"name": "find", "arguments": ') == []
    begun = parser.push('{"text": "a ')
    assert [type(event).__name__ for event in begun] == ["CallBegun", "Arguments"]
    assert [event.text for event in parser.push("word")] == ["word"]  # type: ignore[union-attr]


def test_without_tools_nothing_is_parsed() -> None:
    assert parsed("hermes", HERMES, choice="none") == Reply(content=HERMES)


# ------------------------------------------------------------------------------------------------ special tokens


def test_special_tokens_are_interpreted_and_not_shown() -> None:
    specials = ("<|python_tag|>", "<|eot_id|>", "<|reserved_special_token_0|>")
    form = formats("llama3", specials=specials)
    assert form.needs_specials("auto")
    assert not form.needs_specials("none")
    text, ids = "Hi<|eot_id|> <|python_tag|>print(1)<|eot", specials_of(form)
    assert read(form.parser("auto", NAMES), text, ids) == Reply("Hi print(1)<|eot")
    assert read(form.parser("auto", NAMES, shows_specials=True), "<|eot_id|>!", ids) == Reply("<|eot_id|>!")
    stray = formats("mistral", specials=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"))
    text, ids = "a[ARGS]b[TOOL_CALLS]find it[CALL_ID]</s>", specials_of(stray)
    assert read(stray.parser("auto", NAMES), text, ids) == Reply("abfind it")


def test_plain_text_markers_do_not_require_special_tokens() -> None:
    assert not formats("hermes", "qwen3", ("<|im_end|>",)).needs_specials("auto")
    assert formats("hermes", "mistral", ("[THINK]",)).needs_specials("none")


# ------------------------------------------------------------------------------------------------------ any text

ALPHABET = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<|eot_id|>",
        ),
        *(
            '{"name": "find", "arguments": ',
            '{"name": "now", "parameters": {',
            '"arguments"',
            '"name"',
            '"',
            "\\",
            '\\"',
        ),
        *(
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            ";",
            " ",
            "\n",
            "a",
            "é",
            "1",
            "null",
            "find",
            "<",
            "</",
            "<think>",
            "</think>",
        ),
        *("[THINK]", "[/THINK]", "<thi", HERMES),
    ]
)
TEXTS = st.lists(ALPHABET, max_size=24).map("".join)
SPECIALS = ("<|python_tag|>", "<|eot_id|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


@settings(max_examples=part_of(300, 75), deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=12),
    tools=st.sampled_from(["hermes", "llama3", "mistral", None]),
    reasoning=st.sampled_from(["deepseek_r1", "qwen3", "mistral", None]),
    specials=st.sampled_from([(), SPECIALS]),
    tail=st.sampled_from([None, "", "<think>\n", "</think>\n\n"]),
)
def test_parsing_does_not_depend_on_where_the_text_is_split(
    text: str,
    cuts: list[int],
    tools: str | None,
    reasoning: str | None,
    specials: tuple[str, ...],
    tail: str | None,
) -> None:
    form = formats(tools, reasoning, specials)
    whole = read(form.parser("auto", NAMES, tail), [text])
    indices = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(indices)]
    assert read(form.parser("auto", NAMES, tail), pieces) == whole
    assert read(form.parser("auto", NAMES, tail), text) == whole


@settings(max_examples=part_of(200, 50), deadline=None)
@given(text=TEXTS, tools=st.sampled_from(["hermes", "llama3", "mistral"]))
def test_a_reply_without_calls_loses_no_text(text: str, tools: str) -> None:
    reply = parsed(tools, text)
    if not reply.calls:
        assert reply.content == text


@pytest.mark.parametrize("tools", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize(
    "unit",
    [" ", "<", "<tool_call>", "[TOOL_CALLS]", "{", '{"', '{"name": "find", "arguments": {"', "<think>", "\\", ";{"],
)
def test_parsing_takes_linear_time(tools: str, unit: str) -> None:
    form = formats(tools, "qwen3", SPECIALS)

    def took_s(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        begin_s = time.process_time()
        read(form.parser("auto", NAMES), text)
        return time.process_time() - begin_s

    small_s = min(took_s(10_000) for _ in range(3))
    assert took_s(80_000) < 8 * small_s * 4 + 0.05


# ------------------------------------------------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("form", "tail", "text", "reply"),
    [
        ("qwen3", "assistant\n", "<think>\nHm.\n\nSo.\n</think>\n\nYes.", Reply("Yes.", "Hm.\n\nSo.")),
        ("qwen3", "assistant\n", "Yes, <think> is a word.", Reply("Yes, <think> is a word.")),
        ("qwen3", "assistant\n", "\n\n <think>\nHm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("qwen3", "assistant\n", "\n\nYes.", Reply("\n\nYes.")),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Yes. </think>", Reply("Yes. </think>")),
        ("qwen3", "assistant\n<think>\n", "Hm.\n</think>\nYes.", Reply("Yes.", "Hm.")),
        ("qwen3", None, "Yes.", Reply("Yes.")),
        ("deepseek_r1", None, "Hm.\n</think>\n\nYes.", Reply("Yes.", "Hm.")),
        ("deepseek_r1", "<think>\n", "<think>\nHm.\n</think>\n\nYes.", Reply("Yes.", "Hm.")),
        ("deepseek_r1", "<think>\n", "Hm. I wonder</thi", Reply("", "Hm. I wonder</thi")),
        ("deepseek_r1", "<think>\n", "\n</think>\n\nYes.", Reply("Yes.")),
        ("deepseek_r1", "<think>\n", "", Reply()),
        ("mistral", "[/INST]", "[THINK]Hm.[/THINK]Yes.", Reply("Yes.", "Hm.")),
    ],
)
def test_reasoning_is_separated_from_the_content(form: str, tail: str | None, text: str, reply: Reply) -> None:
    known = formats(reasoning=form)
    assert read(known.parser(tail=tail), [text]) == reply
    assert read(known.parser(tail=tail), text) == reply


def test_calls_are_parsed_after_the_reasoning_and_not_in_it() -> None:
    form = formats("hermes", "qwen3")
    text = f"<think>\nMaybe <tool_call>.\n</think>\n\n{HERMES}"
    assert read(form.parser("auto", NAMES), text) == Reply("", "Maybe <tool_call>.", [FOUND], 1)


@pytest.mark.parametrize(
    "head", ["<|channel|>", "<|start|>assistant<|channel|>", "<|channel|>final<|message|>a<|channel|>"]
)
def test_a_header_without_an_end_is_content(head: str) -> None:
    """It must not begin again at the same place for ever."""
    text = "x " * 2000
    reply = parsed("openai", head + text)
    assert reply.content.endswith(text.strip()) or reply.content.endswith(text)
