"""What makes much of a short text is refused, with the name of the part."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tokenizers.text_growth import check_growth

SPECIAL = {"SpecialToken": {"id": "<s>", "type_id": 0}}


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*parts]}


def template(num: int, ids: list[int]) -> dict[str, Any]:
    special = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": [SPECIAL] * num, "pair": [], "special_tokens": special}


def charsmap(text: str) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a\0" + text.encode() + b"\0").decode()


def check(folder: Path, **parts: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    check_growth(folder / "tokenizer.json", 2**20, "x/tokenizer.json")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": sequence(*[replace("h", "hh")] * 7)}, "normalizer can make 128 characters of one; at most 64"),
        ({"normalizer": sequence(*[sequence(replace("h", "hhh"))] * 200)}, "normalizer can make more than 10.12 char"),
        ({"normalizer": replace("h", "x" * 65)}, "normalizer can make 65 characters"),
        ({"normalizer": {**replace("", "x" * 64), "pattern": {"Regex": "h*"}}}, "normalizer can make 65 characters"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 64}}, "normalizer can make 65 characters"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("y" * 100)}},
            "normalizer can make 100",
        ),
        ({"post_processor": template(2000, [1])}, "post_processor adds 2000 tokens to each text; at most 1024"),
        ({"post_processor": template(2, [1] * 600)}, "post_processor adds 1200 tokens to each text"),
        (
            {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(1, [1] * 1025)]}},
            "post_processor adds 1025 tokens",
        ),
        (
            {"model": {"max_input_chars_per_word": 10**9}},
            "model.max_input_chars_per_word is 1000000000; at most 1000 is",
        ),
        ({"model": {"end_of_word_suffix": "w" * 2000}}, "model.end_of_word_suffix has 2002 bytes; at most 1024"),
        ({"model": {"continuing_subword_prefix": "w" * 2000}}, "model.continuing_subword_prefix has 2002 bytes"),
    ],
)
def test_what_grows_is_refused(tmp_path: Path, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"^x/tokenizer.json: {words}"):
        check(tmp_path, **parts)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": None, "post_processor": None, "model": {"end_of_word_suffix": None, "vocab": {}}},
        {"normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))},
        {"normalizer": sequence({"type": "NFKC"}, *[{**replace("", " "), "pattern": {"Regex": " {2,}"}}] * 9)},
        {"normalizer": sequence(replace("``", '"'), replace("''", '"'), {"type": "Precompiled"})},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("y" * 18)}},
        {"post_processor": template(3, [1, 2]), "model": {"continuing_subword_prefix": "##"}},
        {"post_processor": 5, "normalizer": [5], "model": {"max_input_chars_per_word": None}},
        {"model": {"max_input_chars_per_word": 100}},
    ],
)
def test_what_models_have_is_taken(tmp_path: Path, parts: dict[str, Any]) -> None:
    check(tmp_path, **parts)


TEMPLATE: dict[str, Any] = {"type": "TemplateProcessing", "single": [SPECIAL], "special_tokens": {}}


@pytest.mark.parametrize(
    "post_processor",
    [
        TEMPLATE | {"single": [{"SpecialToken": []}]},
        TEMPLATE | {"single": [{"SpecialToken": {"id": []}}, None, "a"]},
        TEMPLATE | {"single": "a", "pair": {"SpecialToken": {}}},
        TEMPLATE | {"special_tokens": {"a": {"ids": 1}, "b": {"ids": None}, "c": []}},
        TEMPLATE | {"special_tokens": []},
        [],
        1,
    ],
)
def test_what_the_library_can_t_read_is_left_to_it(tmp_path: Path, post_processor: Any) -> None:
    check(tmp_path, post_processor=post_processor)


def test_a_normalizer_nested_too_deep_is_refused(tmp_path: Path) -> None:
    file, is_refused = tmp_path / "tokenizer.json", []
    for depth in range(20, 620, 20):
        begin = '{"type":"Sequence","normalizers":['
        file.write_text('{"normalizer":' + begin * depth + '{"type":"Lowercase"}' + "]}" * depth + "}")
        try:
            check_growth(file, 2**20, "x/tokenizer.json")
        except ModelError as error:
            is_refused.append(str(error).startswith("x/tokenizer.json cannot be read: "))
    assert is_refused and all(is_refused)
