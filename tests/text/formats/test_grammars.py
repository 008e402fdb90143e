"""Grammars of tool calls: every output that one allows parses to calls whose arguments match the tools' schemas."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.text.formats.chat_formats import TOOL_FORMATS, ChatFormats, either
from pipeline.text.formats.grammar import lark
from tests.text.formats.replies import REASONING, TOOLS, Reply, read

SPECIALS = (
    *("<|endoftext|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *(mark for one in TOOL_FORMATS if one.name not in ("hermes", "glm45", "qwen3_coder") for mark in one.marks),
)
WORDS = (
    *('{"name": "', '"arguments": ', '": ', "\n", "</tool_call>", "find", "</think>"),
    *("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</parameter>"),
)
"""Plain tokens of several characters, added to the vocabulary as Qwen adds its special tokens."""

FIND = {
    "type": "object",
    "properties": {
        "where": {"enum": ["here", "there"]},
        "at": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["where", "at"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": FIND,
    "find_all": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS_JSON = json.dumps(
    [
        {"type": "function", "function": {"name": name, "description": "…", "parameters": schema}}
        for name, schema in list(SCHEMAS.items())[:2]
    ]
    + [{"type": "function", "function": {"name": "now"}}]
)


class Vocabulary:
    """The bytes, and these special and plain tokens."""

    def __init__(self, specials: Sequence[str], words: Sequence[str]) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys(specials)])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in words])
        self.tokenizer = tokenizer
        self.added = {
            token.content: lark.AddedToken(token_id, token.content, token.special)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        self.end = self.added[END].id
        self.guide = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=self.end)

    def shown(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def takes(self, grammar: str, text: str) -> bool:
        """Whether a grammar allows this reply."""
        matcher = llguidance.LLMatcher(self.guide, grammar)
        assert not matcher.get_error(), matcher.get_error()
        ids = self.tokenizer.encode(text).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


END = "<|endoftext|>"
FULL = Vocabulary(SPECIALS, WORDS)
PLAIN = Vocabulary([END], [])
"""Without tokens for marks"""
TOKENIZER, ADDED, GUIDE = FULL.tokenizer, FULL.added, FULL.guide
CLOSING = ('"', "}", "]", "</think>", "[/THINK]", "</arg_value>", "</parameter>", '<|"|>', "<escape>", "<|end|>", "<")


def formats(
    tools: str | None, reasoning: str | None = None, template: str = "", added: Mapping[str, lark.AddedToken] = ADDED
) -> ChatFormats:
    return ChatFormats(
        None if tools is None else TOOLS[tools],
        None if reasoning is None else REASONING[reasoning],
        template,
        added,
    )


def walk(grammar: str, seed: int, max_tokens: int = 600, vocabulary: Vocabulary = FULL) -> str:
    """A reply of tokens sampled from those that the grammar allows, as the text that a parser gets: with special
    tokens except the last. White space is rarely sampled, and the end half of the time if it is allowed."""
    guide, end = vocabulary.guide, vocabulary.end
    matcher = llguidance.LLMatcher(guide, grammar)
    assert not matcher.get_error(), matcher.get_error()
    rng = random.Random(seed)
    mask = llguidance.numpy.allocate_token_bitmask(1, guide.vocab_size)
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < max_tokens:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: guide.vocab_size]).tolist()
        if end in allowed and (rng.random() < 0.5 or len(allowed) == 1):
            break
        allowed = [one for one in allowed if one != end]
        plain = [one for one in allowed if vocabulary.shown(one).strip()] or allowed
        closing = [one for one in plain if vocabulary.shown(one) in CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.4 else plain)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return str(vocabulary.tokenizer.decode(ids, skip_special_tokens=False))


def check(reply: Reply) -> None:
    """Fail unless its calls are complete and match the tools."""
    assert len(reply.calls) == reply.num_ended >= 1
    for name, arguments in reply.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


WAYS = [("hermes", ""), ("generic", ""), ("llama3", ""), ("mistral", ""), ("mistral", "[ARGS]"), (None, "")]


@pytest.mark.parametrize(("tools", "template"), WAYS)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_forces_one_or_more_calls_that_match_the_tools(
    tools: str | None, template: str, parallel: bool
) -> None:
    form = formats(tools, template=template)
    grammar = form.calls("required", "", TOOLS_JSON, parallel=parallel).lark()
    nums, names = set(), set()
    for seed in range(30):
        text = walk(grammar, seed)
        reply = read(form.parser("required", SCHEMAS), [text])
        check(reply)
        assert (reply.content, reply.reasoning) == ("", "")
        nums.add(len(reply.calls))
        names.update(name for name, _ in reply.calls)
    assert names == set(SCHEMAS)
    assert nums == {1} if not parallel else len(nums) > 1


@pytest.mark.parametrize(("tools", "template"), WAYS)
def test_a_named_choice_forces_one_call_of_that_function(tools: str | None, template: str) -> None:
    form = formats(tools, template=template)
    grammar = form.calls("named", "find", TOOLS_JSON, parallel=True).lark()
    for seed in range(10):
        reply = read(form.parser("named", SCHEMAS), walk(grammar, seed))
        check(reply)
        assert [name for name, _ in reply.calls] == ["find"]


@pytest.mark.parametrize("reasoning", ["qwen3", "mistral"])
@pytest.mark.parametrize("tail", ["", "open", "over"])
def test_calls_are_enforced_after_the_reasoning(reasoning: str, tail: str) -> None:
    start, end = REASONING[reasoning].start, REASONING[reasoning].end
    prompt = {"": "assistant\n", "open": f"{start}\n", "over": f"{start}\n\n{end}\n\n"}[tail]
    form = formats("hermes", reasoning)
    grammar = form.after_reasoning(form.calls("required", "", TOOLS_JSON, parallel=False).lark(), prompt)
    has_thought = False
    for seed in range(20):
        text = walk(grammar, seed, 600)
        if end not in text and (tail == "open" or start in text):
            continue  # still reasoning
        reply = read(form.parser("required", SCHEMAS, prompt), [text])
        check(reply)
        has_thought = has_thought or bool(reply.reasoning)
        if tail == "over":
            assert text.startswith("<tool_call>")
    assert has_thought == (tail != "over")


def test_the_reply_may_open_reasoning_if_the_prompt_does_not() -> None:
    form = formats("hermes", "qwen3")
    calls = form.calls("named", "now", TOOLS_JSON, parallel=True).lark()
    matcher = llguidance.LLMatcher(GUIDE, form.after_reasoning(calls, "assistant\n"))
    text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert matcher.consume_tokens(TOKENIZER.encode(text).ids)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    "output", ["start: /[ab]{2}/", llguidance.LLMatcher.grammar_from_json_schema({"enum": ["ab"]})]
)
def test_with_structured_outputs_a_reply_matches_them_or_is_calls(output: str) -> None:
    form = formats("hermes", "qwen3")
    grammar = form.after_reasoning(
        either(output, form.calls("auto", "", TOOLS_JSON, parallel=True).lark()), "</think>\n\n"
    )
    replies = [read(form.parser("auto", SCHEMAS, "</think>\n\n"), [walk(grammar, seed)]) for seed in range(30)]
    assert {bool(reply.calls) for reply in replies} == {True, False}
    for reply in replies:
        assert bool(reply.calls) != bool(reply.content)
        if reply.calls:
            check(reply)
        else:
            assert reply.content.strip('"') in ("ab", "aa", "ba", "bb")


def test_structured_outputs_are_enforced_after_the_reasoning() -> None:
    form = formats(None, "deepseek_r1")
    grammar = form.after_reasoning("start: /[ab]{2}/", "<think>\n")
    matcher = llguidance.LLMatcher(GUIDE, grammar)
    assert matcher.consume_tokens(TOKENIZER.encode("Hm. No <b>.\n</think>\n\nab").ids)
    assert matcher.is_accepting()
    assert not matcher.try_consume_tokens(TOKENIZER.encode("a").ids)


def test_without_reasoning_a_grammar_is_unchanged() -> None:
    for form in TOOL_FORMATS:
        assert formats(form.name).after_reasoning("start: /a/", "assistant\n") == "start: /a/"


def test_a_named_tool_must_exist() -> None:
    with pytest.raises(ValueError, match="missing"):
        formats("hermes").calls("named", "missing", TOOLS_JSON, parallel=True)


def test_arguments_are_always_an_object() -> None:
    tools = [
        {"function": {"name": "f", "parameters": {"required": ["a"]}}},
        {"function": {"name": "g", "parameters": {}}},
    ]
    written = formats("hermes").calls("required", "", json.dumps(tools), parallel=False)
    assert [json.loads(bytes(schema)) for schema in written.schemas.values()] == [
        {"type": "object", "required": ["a"]},
        {"type": "object"},
    ]
    for seed in range(10):
        text = walk(written.lark(), seed, 60)
        assert '"arguments": {' in text
