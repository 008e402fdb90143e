"""Words become the ids that they are written with, at the beginning of a text and behind a space."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.stages.ingest.bad_words import MAX_CHARS, BadWord, as_ids
from tests.stages.ingest import models as tiny

BAD = (("b", "a"), ("ba", "d"), ("Ġ", "bad"), ("Ġ", "b"))
"""Merges that make `bad`, ` bad` and ` b` ids of their own."""


def words_tokenizer(*merges: tuple[str, str]) -> Tokenizer:
    """Bytes, and what is merged of them."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_word_is_kept_out_at_the_beginning_and_behind_a_space() -> None:
    tokenizer = words_tokenizer(*BAD)
    bad, spaced = ids(tokenizer, "bad"), ids(tokenizer, " bad")
    assert len(bad) == len(spaced) == 1
    assert as_ids(tokenizer, ["bad"], 1000) == [bad, spaced]
    assert as_ids(tokenizer, ["  bad", "x"], 1000) == [bad, spaced, ids(tokenizer, "x")]


def test_both_forms_are_kept_out_where_they_have_other_numbers_of_ids() -> None:
    """As "Athens", two ids of SmolLM2's, and " Athens", one: where the bare form is longer, or shorter."""
    tokenizer = words_tokenizer(("d", "o"), ("Ġ", "b"), ("Ġb", "y"))
    by, spaced = ids(tokenizer, "by"), ids(tokenizer, " by")
    assert (len(by), len(spaced)) == (2, 1)
    assert as_ids(tokenizer, ["by"], 1000) == as_ids(tokenizer, [" by"], 1000) == [by, spaced]
    tokenizer = words_tokenizer(("b", "y"), ("Ġ", "b"))
    by, spaced = ids(tokenizer, "bx"), ids(tokenizer, " bx")
    assert spaced[-1] == by[-1] and spaced[-2:] != by
    assert as_ids(tokenizer, ["bx", "x"], 1000) == [by, spaced, ids(tokenizer, "x")]


def test_a_word_is_kept_out_as_it_was_given() -> None:
    tokenizer = words_tokenizer(("Ċ", "b"), ("Ċb", "a"), ("b", "a"), ("Ġ", "ba"))
    bare, spaced, given = (ids(tokenizer, text) for text in ("ba", " ba", "\nba"))
    assert len({*map(tuple, (bare, spaced, given))}) == 3
    assert as_ids(tokenizer, ["\nba"], 1000) == [bare, spaced, given]
    assert as_ids(tokenizer, [" ba", "  ba", "x\nba"], 1000)[:4] == [bare, spaced, bare, spaced]


def test_a_space_of_its_own_makes_no_second_form() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert as_ids(tokenizer, ["ab"], 258) == [ids(tokenizer, "ab")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", ""], r"bad_words\[1\]' is empty"),
        ([" "], r"bad_words\[0\]' has no token"),
        (["x" * (MAX_CHARS + 1)], "more than 65536 characters"),
        (["\ud800"], "can't be tokenized"),
    ],
)
def test_words_that_can_not_be_kept_out_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(BadWord, match=message):
        as_ids(tiny.byte_tokenizer(), words, 258)


def test_ids_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(BadWord, match="outside the model's vocabulary"):
        as_ids(tiny.byte_tokenizer(), ["ÿ"], 10)
