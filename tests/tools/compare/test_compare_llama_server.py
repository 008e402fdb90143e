"""tools/compare_llama_server: its files, what it compares, and its rules."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.prepare.gguf.file import GgufFile
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.gguf.tokenizers.special_tokens import CONTROL, NORMAL
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import read_vocabulary
from pipeline.text.formats.tool_parsers.generic import tools_section
from tools.compare_llama_server import __main__ as command
from tools.compare_llama_server import small_file
from tools.compare_llama_server.compare import Case, compare, is_same_reply
from tools.compare_llama_server.inputs import WEATHER
from tools.compare_llama_server.rules import RULES, rule_of
from tools.compare_llama_server.servers import ErrorReply, Rendered, Reply
from tools.compare_llama_server.variants import CONTENT, FileVariant, variants
from tools.tokenizer_vectors.texts import TEXTS

FORMS = {variant.name: variant for variant in variants()}
PLAIN = FORMS["byte-level"]
SPM = FORMS["sentencepiece"]


def test_each_form_has_what_it_says() -> None:
    for variant in FORMS.values():
        keys = variant.keys
        assert len(set(keys["tokens"])) == len(keys["tokens"]), variant.name
        for key, value in variant.changes.items():
            assert (value is None) == (key not in keys), (variant.name, key)
        assert set(variant.added) <= set(keys["tokens"]), variant.name
        order = small_file.cycle(keys["tokens"], variant.types, 1)
        assert sorted(order) == list(range(len(keys["tokens"]))), variant.name
        assert len(variant.templates) == 1 or variant.is_chat


def test_two_words_are_before_each_special_token() -> None:
    variant = FORMS["bpe, ends, control"]
    order = small_file.cycle(variant.keys["tokens"], variant.types, 1)
    special = [index for index, token_id in enumerate(order) if variant.types[token_id] == CONTROL]
    assert len(special) > 10
    assert all(variant.types[order[index - step]] == NORMAL for index in special for step in (1, 2))
    with pytest.raises(ValueError, match="need 3 words, not 2"):
        small_file.cycle(["a", "b", "<s>"], [NORMAL, NORMAL, CONTROL], 1)


def test_a_file_has_its_form(tmp_path: Path) -> None:
    variant = FORMS["spm, keys"]
    order = small_file.write(tmp_path / "a.gguf", variant)
    metadata = Metadata(GgufFile(tmp_path / "a.gguf"))
    vocabulary = read_vocabulary(metadata, len(order))
    assert vocabulary.tokens == variant.keys["tokens"]
    assert [vocabulary.tokens[i] for i in vocabulary.end_ids][:2] == ["</s>", "<eot>"]
    assert metadata.get("tokenizer.chat_template", str) == CONTENT
    tensors = {"token_embd.weight", "output.weight", "blk.1.ffn_down.weight"}
    assert tensors <= set(GgufFile(tmp_path / "a.gguf").tensors)
    small_file.write(tmp_path / "b.gguf", FORMS["tied"])
    assert "output.weight" not in GgufFile(tmp_path / "b.gguf").tensors


class Fake:
    """A server whose tokens are characters. `wrong` is the name of a method that it answers otherwise."""

    def __init__(self, wrong: str = "") -> None:
        self._wrong = wrong

    def _is(self, name: str, right: Any, other: Any) -> Any:
        return other if name == self._wrong else right

    def tokenize(self, text: str, *, special: bool, ends: bool) -> list[int]:
        return [*map(ord, text), *self._is("tokenize", [], [1])]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._is("detokenize", "".join(map(chr, ids)), "?"))

    def render(self, body: Mapping[str, Any]) -> Rendered:
        return Rendered("x", [1, *self._is("render", [], [2])])

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        return Reply("x", bool(self._is("complete", True, False)), [1], [-0.5])

    def chat(self, body: Mapping[str, Any], max_tokens: int) -> Reply:
        return Reply("x", bool(self._is("chat", True, False)), [1], [-0.5])


@pytest.mark.parametrize(
    ("name", "wrong", "whats"),
    [
        ("byte-level", "tokenize", {"tokenize", "tokenize with BOS and EOS", "tokenize marks as text"}),
        ("byte-level", "detokenize", {"detokenize"}),
        ("byte-level", "complete", {"reply", "reply with <s>", "reply with </s>"}),
        ("chat qwen3", "render", {"chat"}),
        ("chat qwen3", "chat", {"chat's reply"}),
    ],
)
def test_each_difference_is_found(name: str, wrong: str, whats: set[str]) -> None:
    variant = FORMS[name]
    order = small_file.cycle(variant.keys["tokens"], variant.types, 1)
    assert all(case.is_equal for case in compare(variant, order, Fake(), Fake()))
    cases = list(compare(variant, order, Fake(), Fake(wrong)))
    assert {case.what for case in cases if not case.is_equal} == whats


def test_replies_are_the_same_up_to_rounding() -> None:
    reply = Reply("ab", False, [1, 2, 3], [-0.5, -0.6, -0.7])
    assert is_same_reply(reply, reply._replace(logprobs=[-0.53, -0.58, -0.7]))
    assert is_same_reply(reply, reply._replace(ids=[1, 3], logprobs=[-0.5, -0.7])), "2 is a part of a character"
    assert not is_same_reply(reply, reply._replace(logprobs=[-0.5, -0.66, -0.7]))
    assert not is_same_reply(reply, reply._replace(ids=[1, 3, 2]))
    assert not is_same_reply(reply, reply._replace(text="abc"))
    assert not is_same_reply(reply, reply._replace(ends=True))
    assert is_same_reply(reply._replace(logprobs=[]), reply), "Pipeline was not asked for them"


REPLY = Reply("ab", False, [1, 2], [-0.5, -0.6])
PROMPT = Rendered("hi", [5, 6])
BOS = PLAIN.keys["bos_token_id"]


def of_ids(*ids: int, ends: bool = False) -> Reply:
    return Reply("ab", ends, list(ids), [-0.5] * len(ids))


def case(variant: FileVariant, what: str, asked: Any, ours: Any, theirs: Any, again: Any = None) -> Case:
    return Case(variant, what, asked, ours, theirs, again)


END = PLAIN.keys["tokens"].index("a")
NEAR: dict[str, tuple[Case, Case | None]] = {
    "incomplete characters": (
        case(PLAIN, "reply", [1], REPLY, REPLY._replace(text="ab\ufffd")),
        case(PLAIN, "reply", [1], REPLY, REPLY._replace(text="ab!")),
    ),
    "space before texts": (
        case(SPM, "detokenize", [1], "a b", " a b"),
        case(PLAIN, "detokenize", [1], "a b", " a b"),
    ),
    "ends are not text": (
        case(PLAIN, "reply", [1], Reply("b", True, [END], [-0.5]), Reply("ba", True, [END], [-0.5])),
        case(PLAIN, "reply", [1], Reply("b", False, [END], [-0.5]), Reply("ba", False, [END], [-0.5])),
    ),
    "marks of messages": (
        case(PLAIN, "reply", [1], REPLY, REPLY._replace(text="a<|start|>b")),
        case(PLAIN, "tokenize marks as text", "<|start|>", [1], [2], ["a", "b"]),
    ),
    "unused tokens": (
        case(FORMS["byte-level, unused"], "detokenize", [1], "a[unused0]", "a"),
        case(PLAIN, "detokenize", [1], "a[unused0]", "a"),
    ),
    "bytes without types": (
        case(FORMS["sentencepiece, no token_type"], "detokenize", [1], "é", "<0xC3><0xA9>"),
        case(SPM, "detokenize", [1], "é", "<0xC3><0xA9>"),
    ),
    "spaces in special tokens": (
        case(SPM, "detokenize", [1], "<PRE>", "▁<PRE>"),
        case(PLAIN, "detokenize", [1], "<PRE>", "▁<PRE>"),
    ),
    "marks as text": (
        case(PLAIN, "tokenize marks as text", "a</s>", [1, 2], [3], ["a</s>", "a</s>"]),
        case(PLAIN, "tokenize marks as text", "a</s>", [1, 2], [3], ["a</s>", "a </s>"]),
    ),
    "the model's own pattern": (
        case(FORMS["pre tekken"], "tokenize", TEXTS[8], [1], [2]),
        case(FORMS["pre tekken"], "tokenize", TEXTS[0], [1], [2]),
    ),
    "NFC": (
        case(FORMS["pre qwen2"], "tokenize", "e\u0301", [1], [2]),
        case(FORMS["pre qwen2"], "tokenize", "\u00e9", [1], [2]),
    ),
    "spaces of unigram models": (
        case(FORMS["unigram with all spaces"], "tokenize", " ", [3, 3], [3]),
        case(FORMS["unigram with all spaces"], "tokenize", " ", [3, 4], [3]),
    ),
    "equal scores": (case(FORMS["spm, no scores"], "tokenize", "a", [1], [2]), case(SPM, "tokenize", "a", [1], [2])),
    "separator": (
        case(FORMS["bpe, add_sep"], "tokenize with BOS and EOS", "a", [1, 9], [1]),
        case(FORMS["bpe, add_sep"], "tokenize with BOS and EOS", "a", [1, 9], [2]),
    ),
    "no default of byte-level vocabularies": (
        case(FORMS["chat, no BOS token"], "chat", "one", PROMPT, PROMPT._replace(ids=[11, 5, 6])),
        case(FORMS["spm, no bos_token_id"], "tokenize", "a", [5, 6], [11, 5, 6]),
    ),
    "BOS and EOS are the template's": (
        case(PLAIN, "chat", "one", PROMPT, PROMPT._replace(ids=[BOS, 5, 6])),
        case(PLAIN, "chat", "one", PROMPT, PROMPT._replace(ids=[5, BOS, 6])),
    ),
    "variables of templates": (
        case(PLAIN, "chat", "one", PROMPT, PROMPT._replace(ids=[7]), PROMPT._replace(ids=[7])),
        case(PLAIN, "chat", "one", PROMPT, PROMPT._replace(ids=[7]), PROMPT._replace(ids=[8])),
    ),
    "continued messages": (case(PLAIN, "chat", "continued", PROMPT, PROMPT._replace(ids=[7])), None),
    "tools as text": (
        case(
            PLAIN,
            "chat",
            "tools",
            Rendered(tools_section([WEATHER], choice="auto", name="", parallel=True), [1]),
            PROMPT,
        ),
        case(PLAIN, "chat", "tools", Rendered("weather", [1]), PROMPT),
    ),
    "refused by the template": (
        case(PLAIN, "chat", "system", ErrorReply(400, "System role not supported"), PROMPT),
        case(PLAIN, "chat", "system", ErrorReply(500, "internal error"), PROMPT),
    ),
    "not parsed by llama.cpp": (
        case(PLAIN, "chat", "one", PROMPT, ErrorReply(500, "Unable to generate parser for this template")),
        case(PLAIN, "chat", "one", PROMPT, ErrorReply(500, "internal error")),
    ),
    "parts": (
        case(PLAIN, "chat", "parts", Rendered("<s>one two ", [1]), Rendered("one\n two ", [2])),
        case(PLAIN, "chat", "parts", Rendered("<s>one two ", [1]), Rendered("one\n three", [2])),
    ),
    "parsed replies": (
        case(PLAIN, "chat's reply", "one", REPLY._replace(logprobs=[]), REPLY._replace(text=" ab")),
        case(PLAIN, "chat's reply", "one", REPLY._replace(logprobs=[]), REPLY._replace(text=" ab", ids=[3, 2])),
    ),
    "grammars of calls": (
        case(PLAIN, "chat's reply", "tools", of_ids(1, BOS, 2), of_ids(1, BOS, 3)),
        case(PLAIN, "chat's reply", "tools", of_ids(1, 4, 2), of_ids(1, 4, 3)),
    ),
    "ends of chat formats": (
        case(PLAIN, "chat's reply", "one", of_ids(1, 2, ends=True), of_ids(1, 2, 3)),
        case(PLAIN, "chat's reply", "one", of_ids(1, 2), of_ids(1, 2, 3)),
    ),
}
"""For each rule, a difference that it explains, and one that no rule does."""


@pytest.mark.parametrize("name", NEAR)
def test_a_rule_explains_its_differences_alone(name: str) -> None:
    explained, other = NEAR[name]
    assert not explained.is_equal
    rule = rule_of(explained)
    assert rule is not None and rule.name == name
    if other is not None:
        assert not other.is_equal and rule_of(other) is None


def test_each_rule_is_tested_and_has_a_name_of_its_own() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    assert {rule.name for rule in RULES} == set(NEAR)


def test_without_a_server_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LlamaCpp", lambda cache, version: type("", (), {"server": tmp_path / "none"}))
    assert command.main([]) == 2
    assert "run `tools/compare_peers --build-only --servers llama.cpp` once" in capsys.readouterr().err
    assert command.main(["--server", str(tmp_path / "other")]) == 2
    assert f"{tmp_path / 'other'} is missing: name a llama-server" in capsys.readouterr().err
    assert command.main(["--server", sys.executable, "--only", "no such file"]) == 2
    assert "see --list" in capsys.readouterr().err


def test_the_files_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "tied"]) == 0
    assert capsys.readouterr().out.splitlines() == ["tied", "tied, Q8_0"]
