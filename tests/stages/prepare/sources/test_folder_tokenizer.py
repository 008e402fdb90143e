"""The tokenizer of a Hugging Face folder: old formats, ids and changed files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tokenizers.tokenizer_check import MAX_ADDED_TOKENS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.sources.folders import prepared


def test_an_old_tokenizer_format_is_converted(source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    (source / "merges.txt").write_text("\n".join(" ".join(pair) for pair in tokenizer["merges"]))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})
    )
    converted = Tokenizer.from_file(str(prepared(source) / "tokenizer.json"))
    original = checkpoints.byte_level()
    for text in checkpoints.TEXTS:
        assert converted.encode(text).ids == original.encode(text).ids


def edit_tokenizer(source: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a folder's tokenizer.json."""
    path = source / "tokenizer.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))


def template_with(token_id: int) -> dict[str, Any]:
    """A post-processor that prepends an id to each text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": [token_id], "tokens": ["x"]}},
    }


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
GIVES_ID: dict[str, tuple[Callable[[dict[str, Any], int], Any], str]] = {
    "the vocabulary": (lambda state, i: state["model"]["vocab"].update(a=i), r"its vocabulary gives 'a'"),
    "an added token": (
        lambda state, i: state["added_tokens"].append({"id": i, "content": "<x>"} | ADDED),
        r"added_tokens gives '<x>'",
    ),
    "a template": (lambda state, i: state.update(post_processor=template_with(i)), r"post_processor has"),
    "an end": (
        lambda state, i: state.update(post_processor={"type": "BertProcessing", "sep": ["x", i], "cls": ["<s>", 1]}),
        r"post_processor has",
    ),
    "a template among others": (
        lambda state, i: state.update(post_processor={"type": "Sequence", "processors": [template_with(i)]}),
        r"post_processor has",
    ),
}


@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1])
@pytest.mark.parametrize("file", GIVES_ID)
def test_token_ids_beyond_int32_are_reported(source: Path, file: str, token_id: int) -> None:
    edit, words = GIVES_ID[file]
    edit_tokenizer(source, lambda state: edit(state, token_id))
    message = rf"tokenizer\.json: {words} the token id {token_id}; the largest supported id is 2147483647"
    with pytest.raises(ModelError, match=message):
        prepared(source)


@pytest.mark.parametrize("file", GIVES_ID)
def test_the_largest_int32_is_a_token_id(source: Path, file: str) -> None:
    edit, _ = GIVES_ID[file]
    edit_tokenizer(source, lambda state: edit(state, 2**31 - 1))
    assert prepared(source)


def test_token_ids_of_an_old_tokenizer_format_are_checked(source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(tokenizer["vocab"] | {"a": 2**31}))
    (source / "merges.txt").write_text("")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}')
    with pytest.raises(ModelError, match=r"its vocabulary gives 'a' the token id 2147483648"):
        prepared(source)


def test_an_inconsistent_old_tokenizer_format_is_reported(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text('{"a": 0}')
    (source / "merges.txt").write_text("x y")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelError, match=r"has vocab\.json only, and transformers cannot make .*vocabulary"):
        prepared(source)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        # The library panics on the first when it reads it, and on the second with each text.
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, r"tokenizer\.json cannot be read: "),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, r"tokenizer.json cannot be read: chunk size"),
        (
            "model",
            {"type": "WordLevel", "vocab": {}, "unk_token": "x"},
            r"tokenizer.json cannot be read: WordLevel error",
        ),
    ],
)
def test_an_unusable_tokenizer_is_reported(source: Path, part: str, value: Any, message: str) -> None:
    edit_tokenizer(source, lambda state: state.update({part: value}))
    with pytest.raises(ModelError, match=message):
        prepared(source)


@pytest.mark.parametrize(
    "name",
    [
        *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "vocab.txt", "spiece.model"),
        *("tokenizer.model", "chat_template.jinja"),
    ],
)
def test_a_change_of_any_tokenizer_file_is_noticed(source: Path, name: str) -> None:
    (source / name).write_text("{}")
    first = prepared(source)
    (source / name).write_text("{ }")
    assert prepared(source) != first


def test_tokens_beyond_the_vocabulary_are_rejected(source: Path) -> None:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<{i}>" for i in range(700)])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<699>"}))
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: the id of eos_token is \d+; it must be an id of the voc"
    ):
        prepared(source)


def test_too_many_added_tokens_are_refused_before_the_tokenizer_is_loaded(source: Path) -> None:
    """The gateway, which other models share, has them all."""

    def edit(state: dict[str, Any]) -> None:
        state["added_tokens"] = [{"id": 700 + i, "content": f"<{i}>"} for i in range(MAX_ADDED_TOKENS + 1)]

    edit_tokenizer(source, edit)
    with pytest.raises(
        ModelError, match=r"tokenizer\.json: added_tokens gives 262145 added tokens; at most 262144 are"
    ):
        prepared(source)


@pytest.mark.parametrize("decoder", [None, {"type": "BPEDecoder", "suffix": "</w>"}])
def test_a_decoder_that_needs_whole_texts_is_refused_before_any_stage_starts(source: Path, decoder: Any) -> None:
    parts = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps({**parts, "decoder": decoder}))
    with pytest.raises(
        ModelError, match=r"tiny/tokenizer\.json: the decoder in the model's tokenizer\.json is not supp"
    ):
        prepared(source)
