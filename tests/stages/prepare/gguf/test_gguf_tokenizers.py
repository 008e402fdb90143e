"""The tokenizers of .gguf files give llama.cpp's ids, for every kind of vocabulary and every pre-tokenizer.

The ids are in a file that `python -m tools.tokenizer_vectors` writes, made by llama.cpp from small vocabularies.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeline.stages.prepare.gguf.file import GgufFile
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.gguf.tokenizers import tokenizer
from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import GgufVocabulary, read_vocabulary
from pipeline.stages.prepare.sources.source import ModelError
from tools.tokenizer_vectors.__main__ import check
from tools.tokenizer_vectors.llama_cpp import SEPARATOR
from tools.tokenizer_vectors.vocabularies import save

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "gguf_tokenizers.json").read_text("utf-8"))
CASES = [(case, pre) for case in VECTORS["cases"] for pre in case["pre"] or [None]]


def vocabulary_of(folder: Path, keys: dict[str, Any]) -> GgufVocabulary:
    path = folder / "vocabulary.gguf"
    save(path, keys)
    return read_vocabulary(Metadata(GgufFile(path)), len(keys["tokens"]))


def build(folder: Path, keys: dict[str, Any]) -> Tokenizer:
    return tokenizer.build(vocabulary_of(folder, keys), "a test")


@pytest.mark.parametrize(("case", "pre"), CASES, ids=[pre or case["vocabulary"] for case, pre in CASES])
def test_texts_have_the_ids_of_llama_cpp(tmp_path: Path, case: dict[str, Any], pre: str | None) -> None:
    keys = VECTORS["vocabularies"][case["vocabulary"]] | ({"pre": pre} if pre else {})
    vocabulary = vocabulary_of(tmp_path, keys)
    built = tokenizer.build(vocabulary, "a test")
    built.encode_special_tokens = True
    ends = (case["adds_bos"], case["adds_eos"] or keys["model"] == "bert")
    assert (vocabulary.add_bos, vocabulary.add_eos) == ends or pre in ADD_SEP
    for text, ids in zip(VECTORS["texts"], case["ids"], strict=True):
        if ids is not None:
            assert built.encode(text, add_special_tokens=False).ids == ids, text


ADD_SEP = ("jina-v1-en", "jina-v2-code", "roberta-bpe")


def test_every_pre_tokenizer_is_compared() -> None:
    compared = {pre for _, pre in CASES}
    others = {name for name, entry in PRE_TOKENIZERS.items() if not entry.is_byte_level}
    assert compared >= {*PRE_TOKENIZERS, "default"} - others
    assert others == {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}


@pytest.mark.parametrize("name", [name for name in VECTORS["vocabularies"] if name.startswith(("byte", "gem", "sen"))])
def test_decoding_gives_the_text_back(tmp_path: Path, name: str) -> None:
    built = build(tmp_path, VECTORS["vocabularies"][name])
    for text in VECTORS["texts"]:
        assert built.decode(built.encode(text).ids) == text


def test_wordpieces_are_put_between_cls_and_sep(tmp_path: Path) -> None:
    built = build(tmp_path, VECTORS["vocabularies"]["wordpiece"])
    encoding = built.encode("The quick")
    assert (encoding.tokens[0], encoding.tokens[-1]) == ("[CLS]", "[SEP]")
    assert built.decode(encoding.ids) == "the quick"


def test_text_that_is_composed_differently_has_the_same_ids_if_the_models_tokenizer_composes(tmp_path: Path) -> None:
    keys = VECTORS["vocabularies"]["byte-level"]
    decomposed = unicodedata.normalize("NFD", "été")
    qwen, gpt2 = build(tmp_path, keys | {"pre": "qwen2"}), build(tmp_path, keys | {"pre": "gpt-2"})
    assert qwen.encode(decomposed).ids == qwen.encode("été").ids
    assert gpt2.encode(decomposed).ids != gpt2.encode("été").ids


def test_a_file_without_a_pre_tokenizer_gets_a_warning_that_names_the_key(tmp_path: Path) -> None:
    keys = {key: value for key, value in VECTORS["vocabularies"]["byte-level"].items() if key != "pre"}
    lines: list[str] = []
    tokenizer.build(vocabulary_of(tmp_path, keys), "old.gguf", lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("old.gguf has no tokenizer.ggml.pre")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    keys = VECTORS["vocabularies"]["byte-level"]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'klingon'; supported are a\.x-4\.0, afmoe, .*youtu"):
        build(tmp_path, keys | {"pre": "klingon"})
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is 'rwkv'; supported are 'gpt2', 'llama', 'gemma4'"):
        build(tmp_path, keys | {"model": "rwkv"})


def test_invalid_rules_of_normalization_are_refused(tmp_path: Path) -> None:
    keys = VECTORS["vocabularies"]["unigram"]
    with pytest.raises(ModelError, match="precompiled_charsmap has values that are not bytes"):
        build(tmp_path, keys | {"precompiled_charsmap": [300]})
    with pytest.raises(ModelError, match="a test: its tokens, scores or precompiled_charsmap are invalid"):
        build(tmp_path, keys | {"precompiled_charsmap": [255, 255, 255, 255, 1]})


def test_the_tool_compares_each_file_with_its_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = (case for case in VECTORS["cases"] if case["vocabulary"] == "sentencepiece")
    save(tmp_path / "ggml-vocab-tiny.gguf", VECTORS["vocabularies"]["sentencepiece"])
    (tmp_path / "ggml-vocab-tiny.gguf.inp").write_bytes(SEPARATOR.join(VECTORS["texts"]).encode())
    lines = [" ".join(map(str, ids)) for ids in case["ids"]]
    out = tmp_path / "ggml-vocab-tiny.gguf.out"
    out.write_text("\n".join(lines) + "\n")
    assert check(tmp_path) == 0
    assert capsys.readouterr().out == "tiny: 16 of 16 texts agree\n"
    out.write_text("\n".join(["1 2 3", *lines[1:]]) + "\n")
    assert check(tmp_path) == 1
    assert capsys.readouterr().out == "tiny: 15 of 16 texts agree\n"
