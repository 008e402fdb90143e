"""Text decoded id by id equals text decoded at once."""

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary
from tests.slices import part_of
from tests.stages.detokenize.vocabularies import CHARACTERS, byte_fallback, byte_ids, byte_level, id_of

LEVEL = Vocabulary(byte_level())
FALLBACK = Vocabulary(byte_fallback())
LEVEL_BYTES = byte_ids(byte_level())
FALLBACK_BYTES = byte_ids(byte_fallback())


def grown(vocabulary: Vocabulary, tail: list[int], ids: list[int], skip: bool) -> str:
    text = IncrementalDecoder(vocabulary, tail, skip_special_tokens=skip)
    return "".join([*map(text.add, ids), text.finish()])


def any_ids(tokenizer: Tokenizer, **sizes: Any) -> st.SearchStrategy[list[int]]:
    """Ids of any token, many of single bytes, and some without a token."""
    known = st.integers(0, tokenizer.get_vocab_size() - 1)
    unknown = st.sampled_from([tokenizer.get_vocab_size(), 10**6, 2**31 - 1, -1])
    return st.lists(st.one_of(known, st.sampled_from(byte_ids(tokenizer)), unknown), **sizes)


def decoded(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    return tokenizer.decode([token_id for token_id in ids if token_id >= 0], skip_special_tokens=skip)


def settled_by(tail: list[int], skip: bool) -> str:
    """The part of the text of `tail` that no continuation changes."""
    probes = [[], [LEVEL_BYTES[ord("a")]]]
    for length in (1, 2, 3):
        probes += [
            [LEVEL_BYTES[byte] for byte in bytes_] for bytes_ in product((0x80, 0x90, 0xA0, 0xBF), repeat=length)
        ]
    texts = [decoded(byte_level(), tail + probe, skip) for probe in probes]
    same = [len(set(characters)) == 1 for characters in zip(*texts, strict=False)]
    return texts[0][: [*same, False].index(False)]


@settings(max_examples=part_of(400, 100), deadline=None)
@given(any_ids(byte_level(), max_size=40), st.booleans())
def test_byte_level_text_equals_a_full_decode(ids, skip):
    assert grown(LEVEL, [], ids, skip) == decoded(byte_level(), ids, skip)


@settings(max_examples=part_of(300, 75), deadline=None)
@given(any_ids(byte_level(), max_size=6), any_ids(byte_level(), max_size=12), st.booleans())
def test_byte_level_text_continues_after_the_prompt(tail, ids, skip):
    # A lone surrogate at the prompt's end: Python waits for its third byte, although none completes a character.
    assume(LEVEL_BYTES[0xED] not in tail[:-1])
    whole = decoded(byte_level(), tail + ids, skip)
    settled = settled_by(tail, skip)
    assert whole.startswith(settled)
    assert grown(LEVEL, tail, ids, skip) == whole[len(settled) :]


def test_a_character_that_starts_in_the_prompt_is_emitted_whole():
    tail = [LEVEL_BYTES[byte] for byte in "x🤖".encode()[:3]]
    ids = [LEVEL_BYTES[byte] for byte in "x🤖!".encode()[3:]]
    assert grown(LEVEL, tail, ids, True) == "🤖!"


def test_half_a_character_is_held_back_until_the_end():
    text = IncrementalDecoder(LEVEL, [], skip_special_tokens=True)
    assert [text.add(LEVEL_BYTES[byte]) for byte in "🤖".encode()] == ["", "", "", "🤖"]
    assert text.finish() == ""
    assert [text.add(LEVEL_BYTES[byte]) for byte in "🤖".encode()[:3]] == ["", "", ""]
    assert text.finish() == "\ufffd"


def test_a_skipped_special_token_does_not_break_a_character():
    first, *rest = [LEVEL_BYTES[byte] for byte in "é".encode()]
    special = id_of(byte_level(), "<|end|>")
    assert grown(LEVEL, [], [first, special, *rest], True) == "é"
    assert grown(LEVEL, [], [first, special, *rest], False) == "\ufffd<|end|>\ufffd"


FALLBACK_TOKENS = [
    byte_fallback().token_to_id(token)
    for token in ["<unk>", "<s>", "▁", "▁the", "▁fox", "the", "fox", "▁▁", "é", "你", ".", "\n", "▁<0x"]
]


@settings(max_examples=part_of(400, 100), deadline=None)
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(FALLBACK_TOKENS).map(lambda token_id: [token_id]),
            st.sampled_from(CHARACTERS).map(lambda character: [FALLBACK_BYTES[byte] for byte in character.encode()]),
        ),
        max_size=20,
    ),
    num_tail=st.integers(0, 4),
    num_broken=st.integers(0, 3),
    strip=st.sampled_from([0, 1, 2]),
    skip=st.booleans(),
)
def test_byte_fallback_text_equals_a_full_decode_if_bytes_are_characters(pieces, num_tail, num_broken, strip, skip):
    tokenizer = byte_fallback(strip)
    # Output that ends within a character, behind a token that is not a byte.
    broken = [FALLBACK_TOKENS[3], *(FALLBACK_BYTES[byte] for byte in "🤖".encode()[:num_broken])]
    tail = [token_id for piece in pieces[:num_tail] for token_id in piece]
    ids = [token_id for piece in pieces[num_tail:] for token_id in piece] + broken
    whole = decoded(tokenizer, tail + ids, skip)
    assert decoded(tokenizer, tail, skip) + grown(Vocabulary(tokenizer), tail, ids, skip) == whole


def shown_bytes(data: bytes) -> str:
    """Each valid character, and U+FFFD for each other byte."""
    text, position = "", 0
    while position < len(data):
        for length in (1, 2, 3, 4):
            try:
                text += data[position : position + length].decode()
            except UnicodeDecodeError:
                continue
            position += length
            break
        else:
            text += "\ufffd"
            position += 1
    return text


@settings(max_examples=part_of(400, 100), deadline=None)
@given(ids=any_ids(byte_fallback(), max_size=30), skip=st.booleans())
def test_byte_fallback_keeps_valid_characters_next_to_invalid_bytes(ids, skip):
    tokenizer = byte_fallback(0)
    special = {tokenizer.token_to_id(token) for token in ("<unk>", "<s>", "</s>")} if skip else set()
    expected, run = "", b""
    for token_id in ids:
        token = tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None or token_id in special:
            continue
        if token_id in FALLBACK_BYTES:
            run += bytes([FALLBACK_BYTES.index(token_id)])
        else:
            expected += shown_bytes(run) + token.replace("▁", " ")
            run = b""
    assert grown(Vocabulary(tokenizer), [], ids, skip) == expected + shown_bytes(run)


def test_a_leading_space_is_stripped_only_at_the_start_of_a_text():
    the, space = id_of(byte_fallback(), "▁the"), id_of(byte_fallback(), "▁▁")
    start = id_of(byte_fallback(), "<s>")
    assert grown(FALLBACK, [start], [the, the], True) == "the the"
    assert grown(FALLBACK, [start, the], [the], True) == " the"
    assert grown(FALLBACK, [], [space, the], True) == "  the"


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Sequence([decoders.Replace("▁", " ")]), False),
        (decoders.Replace("▁", " "), False),
    ],
)
def test_tokens_without_bytes_are_text(decoder, strips):
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoder
    ids = [id_of(tokenizer, token) for token in ("<s>", "▁the", "fox", "▁the", "<0x41>", "▁▁", "é")]
    expected = " thefox the<0x41>  é"[strips:]
    assert decoded(tokenizer, ids, True) == grown(Vocabulary(tokenizer), [], ids, True) == expected
    assert grown(Vocabulary(tokenizer), ids[:3], ids[3:], True) == " the<0x41>  é"


@cache
def words(cleanup: bool = True, prefix: str = "##") -> Tokenizer:
    """As BERT's: words, and parts of words behind a prefix; also words that `cleanup` changes."""
    contents = ["[UNK]", "[CLS]", "[SEP]", "the", "fox", "##es", "##", "do", "not", "'", "##'", "##s", "n't", "n", "t"]
    contents += ["##n't", ".", ",", "?", "!", "'s", "'m", "'ve", "'re", "a . b", " ' ", " do not"]
    contents += ["@@x", "é", "##é", " "]
    tokenizer = Tokenizer(models.WordPiece({one: index for index, one in enumerate(contents)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix=prefix, cleanup=cleanup)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.add_tokens([AddedToken("##added", special=False)])
    return tokenizer


@settings(max_examples=part_of(400, 100), deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 31), st.sampled_from([32, 10**6, -1])), max_size=12),
    num_tail=st.integers(0, 4),
    skip=st.booleans(),
    cleanup=st.booleans(),
    prefix=st.sampled_from(["##", "@@", ""]),
)
def test_text_of_words_equals_a_full_decode(ids, num_tail, skip, cleanup, prefix):
    tokenizer = words(cleanup, prefix)
    tail, ids = ids[:num_tail], ids[num_tail:]
    text = grown(Vocabulary(tokenizer), tail, ids, skip)
    assert decoded(tokenizer, tail, skip) + text == decoded(tokenizer, tail + ids, skip)


@pytest.mark.parametrize("model", ["words", "unigram"])
def test_a_file_of_words_or_scores_is_read_without_the_library(tmp_path, model):
    path = tmp_path / "tokenizer.json"
    tokenizer = words()
    if model == "unigram":
        tokenizer = Tokenizer(models.Unigram([("<s>", 0.0), ("▁the", -1.0), ("fox", -2.0), ("▁", -3.5)], 0))
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(["<s>", "<mask>"])
    tokenizer.save(str(path))
    vocabulary = Vocabulary.load(path)
    assert not hasattr(vocabulary._token_of, "__self__"), "the tokenizer was loaded"
    ids = list(range(tokenizer.get_vocab_size() + 2))
    assert [vocabulary.token(id) for id in ids] == [tokenizer.id_to_token(id) for id in ids]
    for skip in (True, False):
        assert grown(vocabulary, [], ids, skip) == decoded(tokenizer, ids, skip)


def test_scores_of_one_token_twice_leave_the_ids_to_the_library(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.Unigram([("<s>", 0.0), ("a", -1.0), ("a", -2.0), ("b", -3.5)], 0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(path))
    vocabulary = Vocabulary.load(path)
    assert [vocabulary.token(id) for id in range(5)] == [tokenizer.id_to_token(id) for id in range(5)]


@pytest.mark.parametrize("skip", [True, False])
def test_ids_outside_of_the_vocabulary_have_no_text(skip):
    a = LEVEL_BYTES[ord("a")]
    assert grown(LEVEL, [], [a, 10**9, -1, a], skip) == "aa"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Sequence([decoders.WordPiece(), decoders.Fuse()]),
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_other_decoders_raise_an_error_that_names_the_supported_ones(decoder):
    tokenizer = Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=r"tokenizer\.json is not supported"):
        Vocabulary(tokenizer)


def test_a_vocabulary_is_read_from_a_file(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    ids = byte_level().encode("naïve café 🤖").ids
    assert grown(Vocabulary.load(tmp_path / "tokenizer.json"), [], ids, True) == "naïve café 🤖"


def test_a_vocabulary_file_has_the_tokens_of_the_whole_tokenizer(smollm2_dir):
    vocabulary, tokenizer = smollm2(smollm2_dir)
    assert not hasattr(vocabulary._token_of, "__self__"), "the tokenizer was loaded"
    ids = range(tokenizer.get_vocab_size() + 2)
    assert [vocabulary.token(id) for id in ids] == [tokenizer.id_to_token(id) for id in ids]
    whole = Vocabulary(tokenizer)
    assert vocabulary.special_ids == whole.special_ids
    for skip in (True, False):
        shown, expected = (each.pieces(skip_special_tokens=skip) for each in (vocabulary, whole))
        assert [shown[id] for id in ids] == [expected[id] for id in ids]


def _shift_vocabulary(file):
    file["model"]["vocab"] = {token: id + 1 for token, id in file["model"]["vocab"].items()}


def _move_added(file):
    file["added_tokens"].append({**file["added_tokens"][-1], "content": "<|moved|>", "id": 70_000})


def _repeat_added(file):
    file["added_tokens"].append({**file["added_tokens"][-1], "id": file["added_tokens"][-1]["id"] + 1})


@pytest.mark.parametrize("change", [lambda file: None, _shift_vocabulary, _move_added, _repeat_added])
def test_a_vocabulary_file_in_another_form_has_the_same_tokens(tmp_path, change):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|one|>", "<|two|>"])
    file = json.loads(tokenizer.to_str())
    change(file)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    whole = Tokenizer.from_file(str(path))
    ids = range(max(whole.get_vocab(with_added_tokens=True).values()) + 3)
    vocabulary = Vocabulary.load(path)
    assert [vocabulary.token(id) for id in ids] == [whole.id_to_token(id) for id in ids]
    assert vocabulary.special_ids == Vocabulary(whole).special_ids


@settings(max_examples=part_of(200, 50), deadline=None)
@given(ids=st.lists(st.integers(0, 49_200), max_size=40), skip=st.booleans())
def test_the_default_models_text_equals_a_full_decode(smollm2_dir, ids, skip):
    vocabulary, tokenizer = smollm2(smollm2_dir)
    assert grown(vocabulary, [], ids, skip) == decoded(tokenizer, ids, skip)


@cache
def smollm2(folder: Path) -> tuple[Vocabulary, Tokenizer]:
    path = folder / "tokenizer.json"
    return Vocabulary.load(path), Tokenizer.from_file(str(path))
