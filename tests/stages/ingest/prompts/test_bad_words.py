"""Bad words become their token ids, both at the beginning of a text and after a space."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.stages.ingest.prompts.bad_words import MAX_CHARS, MAX_IDS, BadWord, as_ids
from tests.rig import Rig
from tests.stages.ingest import models as tiny

BAD = (("b", "a"), ("ba", "d"), ("Ġ", "bad"), ("Ġ", "b"))
"""Merges that make `bad`, ` bad` and ` b` single ids."""


def words_tokenizer(*merges: tuple[str, str]) -> Tokenizer:
    """Bytes and their merges."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_bad_word_is_excluded_at_the_beginning_and_after_a_space() -> None:
    tokenizer = words_tokenizer(*BAD)
    bad, spaced = ids(tokenizer, "bad"), ids(tokenizer, " bad")
    assert len(bad) == len(spaced) == 1
    assert as_ids(tokenizer, ["bad"], 1000) == [bad, spaced]
    assert as_ids(tokenizer, ["  bad", "x"], 1000) == [bad, spaced, ids(tokenizer, "x")]


def test_both_forms_are_excluded_if_they_have_different_numbers_of_ids() -> None:
    """For example "Athens" has two ids in SmolLM2, and " Athens" one: the bare form may be longer or shorter."""
    tokenizer = words_tokenizer(("d", "o"), ("Ġ", "b"), ("Ġb", "y"))
    by, spaced = ids(tokenizer, "by"), ids(tokenizer, " by")
    assert (len(by), len(spaced)) == (2, 1)
    assert as_ids(tokenizer, ["by"], 1000) == as_ids(tokenizer, [" by"], 1000) == [by, spaced]
    tokenizer = words_tokenizer(("b", "y"), ("Ġ", "b"))
    by, spaced = ids(tokenizer, "bx"), ids(tokenizer, " bx")
    assert spaced[-1] == by[-1] and spaced[-2:] != by
    assert as_ids(tokenizer, ["bx", "x"], 1000) == [by, spaced, ids(tokenizer, "x")]


def test_a_bad_word_is_excluded_exactly_as_given() -> None:
    tokenizer = words_tokenizer(("Ċ", "b"), ("Ċb", "a"), ("b", "a"), ("Ġ", "ba"))
    bare, spaced, given = (ids(tokenizer, text) for text in ("ba", " ba", "\nba"))
    assert len({*map(tuple, (bare, spaced, given))}) == 3
    assert as_ids(tokenizer, ["\nba"], 1000) == [bare, spaced, given]
    assert as_ids(tokenizer, [" ba", "  ba", "x\nba"], 1000)[:4] == [bare, spaced, bare, spaced]


def test_there_is_no_second_form_if_the_space_is_a_separate_token() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert as_ids(tokenizer, ["ab"], 258) == [ids(tokenizer, "ab")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", ""], r"bad_words\[1\]' is empty"),
        ([" "], r"bad_words\[0\]' has no token"),
        (["x" * (MAX_CHARS + 1)], "more than 65536 characters"),
        (
            ["\U00010000" * 256] * (MAX_IDS // 1024 + 1),
            f"{MAX_IDS + 1024} token ids in all forms, and the limit is {MAX_IDS}",
        ),
        (["\ud800"], "can't be tokenized"),
    ],
)
def test_words_that_cannot_be_excluded_are_rejected(words: list[str], message: str) -> None:
    with pytest.raises(BadWord, match=message):
        as_ids(tiny.byte_tokenizer(), words, 258)


def test_ids_outside_of_the_vocabulary_are_rejected() -> None:
    with pytest.raises(BadWord, match="outside the model's vocabulary"):
        as_ids(tiny.byte_tokenizer(), ["ÿ"], 10)


def test_tokens_that_the_model_excludes_are_bad_words_of_each_request(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path)
    excluded = {"suppress_tokens": [-1, 65, 300], "bad_words_ids": [[66, 67]], "begin_suppress_tokens": [1, 300]}
    (folder / "generation_config.json").write_text(json.dumps(excluded))
    runs = [[65], [66, 67], [m.BEGIN, 1]]
    with Rig("ingest", Settings(), model_dir=folder) as rig:
        rig.start(tiny.facts())
        rig.send(tiny.submit("x"), "gateway.0")
        assert tiny.options_of(rig.receive("schedule", m.Admit)).bad_words_ids == runs
        rig.send(tiny.submit("x", request_id=2, bad_words=["a"]), "gateway.0")
        found = tiny.options_of(rig.receive("schedule", m.Admit)).bad_words_ids
        assert found[:3] == runs and len(found) > 3
        rig.send(tiny.submit("x", request_id=3, pooling=m.Pooling.LAST), "gateway.0")
        assert tiny.options_of(rig.receive("schedule", m.Admit)).bad_words_ids == []
