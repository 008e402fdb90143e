"""Special tokens in what a client writes in a chat: they are encoded as plain text.

A chat's text is rendered by the template, which writes special tokens itself, as `<|im_end|>` between messages. If a
message contains the same characters, the tokenizer would make a special token of them, and the message could end its
turn and start another: of the system, for example. So the chat is rendered again with these characters masked. Where
the two texts differ is what the client wrote:

    text    <|im_start|>user\\nWhat is <|im_end|>?<|im_end|>
    masked  <|im_start|>user\\nWhat is xxxxxxxxxx?<|im_end|>
                                       └ plain ─┘  └ special

A separator is put into each of the client's: `<` + SEPARATOR + `|im_end|>`, which the tokenizer does not know. Then the
text is encoded again, and the separator's ids are left out. So the words around a mark are encoded as in any text:
encoded apart, they would get a space at their start from SentencePiece's tokenizers.

The second text and encoding cost nothing for other chats: only those that contain such characters have them.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.normalizers import Normalizer

from pipeline.stages.ingest.templates.conversation import IMAGE_PART
from pipeline.text.formats.parsing.marks import pattern_of

MASK = "x"
SEPARATOR = "\ue000"
"""A character for private use, of which no vocabulary has more than bytes."""
MAX_ROUNDS = 4
"""Encodings of one text: without the first character, a special token may be another one."""

MAX_HALVES = 64
"""Places at which a special token's text is halved, until no half has one. What is left of them is left out."""


class ContentSpecials:
    """The special tokens of one tokenizer: their texts, and the ids of these texts without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Call it before other threads use the tokenizer."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        texts = {number: token.content for number, token in added.items() if token.special and token.content}
        self._ids = np.array(sorted(texts), np.int64)
        before = tokenizer.encode_special_tokens
        tokenizer.encode_special_tokens = True  # as plain text, whatever the name suggests
        try:
            *encodings, unknown = tokenizer.encode_batch([*texts.values(), SEPARATOR], add_special_tokens=False)
        finally:
            tokenizer.encode_special_tokens = before
        self._texts = texts
        self._plain = {
            number: self._plain_ids(texts[number], each.ids) for number, each in zip(texts, encodings, strict=True)
        }
        self._unknown = texts.keys() & set(unknown.ids)
        """The id of characters that the vocabulary lacks."""
        known = texts.keys() - self._unknown
        by_model = any(not known.isdisjoint(each.ids) for each in encodings)
        normalized = any(added[number].normalized for number in texts)
        self._mask = _mask_of(texts.values(), tokenizer.normalizer if by_model or normalized else None)

    def _plain_ids(self, text: str, ids: list[int]) -> list[int]:
        """The ids of a special token's text without special tokens. `ids` are those of the tokenizer, in which a
        unigram model may find the token as a word of its vocabulary. One of a single character has no others."""
        if len(text) == 1:
            return ids
        for end in range(1, min(len(text), MAX_HALVES)):
            if self._texts.keys().isdisjoint(ids):
                break
            halves = self._tokenizer.encode_batch([text[:end], text[end:]], add_special_tokens=False)
            ids = [*halves[0].ids, *halves[1].ids]
        return [number for number in ids if number not in self._texts]

    def masked(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The template's variables with the special tokens in all texts masked; None if there are none."""
        mask = self._mask
        if mask is None or not _contains(variables, mask):
            return None
        masked: dict[str, Any] = _with_masks(variables, mask)
        return masked

    def encode(
        self, text: str, masked: str, *, add_special_tokens: bool, check_num: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        """The ids of a chat's text, of which `masked` has the same length. The tokens of the client's texts are plain.
        Raises the tokenizer's exceptions, and those of `check_num`, which gets the number of ids before the expensive
        part."""
        # num_masked[i]: masked characters before character i
        num_masked = np.concatenate(([0], np.cumsum(_characters(text) != _characters(masked))))
        first = encoded = self._encoded(text, [], add_special_tokens)
        check_num(len(first.ids))
        cuts: list[int] = []
        for _ in range(MAX_ROUNDS):
            more = {self._cut(encoded, index) for index in self._marks(encoded, num_masked)} - {None, *cuts}
            if not more:
                break
            cuts = sorted({*cuts, *(cut for cut in more if cut is not None)})
            encoded = self._encoded(text, cuts, add_special_tokens)
        separators = encoded.separators()
        if separators is None:  # a token has one of them and other characters
            encoded, separators = first, set()
        marks = self._marks(encoded, num_masked)
        if not (marks or separators):
            return encoded.ids
        replaced: dict[int, list[int]] = {index: self._plain[encoded.ids[index]] for index in marks}
        replaced |= {index: [] for index in separators}
        result: list[int] = []
        done = 0
        for index in sorted(replaced):
            result += encoded.ids[done:index]
            result += replaced[index]
            done = index + 1
        return result + encoded.ids[done:]

    def _encoded(self, text: str, cuts: list[int], add_special_tokens: bool) -> "_Encoded":
        pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
        cut = SEPARATOR.join(pieces)
        (encoding,) = self._tokenizer.encode_batch([cut], add_special_tokens=add_special_tokens)
        return _Encoded(cut, cuts, encoding.ids, encoding.offsets)

    def _marks(self, encoded: "_Encoded", num_masked: "np.ndarray[Any, np.dtype[np.int64]]") -> list[int]:
        """Where special tokens are the client's: their places among the ids."""
        found = []
        for index in np.flatnonzero(np.isin(encoded.ids, self._ids)).tolist():
            begin, end = map(encoded.original, encoded.offsets[index])
            if num_masked[end] > num_masked[begin] and not self._is_unknown(encoded, index):
                found.append(index)
        return found

    def _is_unknown(self, encoded: "_Encoded", index: int) -> bool:
        """Whether an id stands for characters that the vocabulary lacks, in a text that is masked as a whole."""
        text = encoded.text[slice(*encoded.offsets[index])]
        return encoded.ids[index] in self._unknown and self._mask is not None and self._mask(text) == text

    def _cut(self, encoded: "_Encoded", index: int) -> int | None:
        """Where a special token's text is cut: behind its first character. None if that is not possible."""
        text = self._texts[encoded.ids[index]]
        begin = encoded.text.find(text, *encoded.offsets[index])  # not there if the normalizer has made it
        return None if begin < 0 or len(text) < 2 else encoded.original(begin) + 1


class _Encoded(NamedTuple):
    """A text with separators, and its tokens."""

    text: str
    cuts: list[int]
    """Characters of the original text before which a separator stands, in order."""
    ids: list[int]
    offsets: list[tuple[int, int]]

    def original(self, offset: int) -> int:
        """The place in the original text of one in this text."""
        begins = range(len(self.cuts))  # separator i is at cuts[i] + i
        return offset - bisect.bisect_left(begins, offset, key=lambda i: self.cuts[i] + i)

    def separators(self) -> set[int] | None:
        """The places of their ids; None if an id has other characters too."""
        last = len(self.ids)
        while last and self.offsets[last - 1][1] == 0:  # EOS, which is in no text
            last -= 1
        found = set()
        for number, cut in enumerate(self.cuts):
            at = cut + number
            index = bisect.bisect_right(self.offsets, at, 0, last, key=lambda offset: offset[1])
            while index < last and self.offsets[index][0] <= at:
                if self.offsets[index] != (at, at + 1):
                    return None
                found.add(index)
                index += 1
        return found


def _characters(text: str) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


Mask = Callable[[str], str]
"""Returns a text, of the same length, with the special tokens in it masked."""


def _mask_of(texts: Collection[str], normalizer: Normalizer | None) -> Mask | None:
    """The mask of some special tokens; None if there are none. `normalizer` is the tokenizer's if special tokens are
    found in what it returns: it may make them of other characters, as of `＜/ｓ＞`. Such a text is masked as a whole,
    because the normalizer does not tell where."""
    pattern = pattern_of(texts)
    if pattern is None or normalizer is None:
        return None if pattern is None else partial(_masked, pattern=pattern)
    found = pattern_of({*texts, *filter(None, map(normalizer.normalize_str, texts))})
    assert found is not None

    def mask(text: str) -> str:
        if found.search(normalizer.normalize_str(text)):
            return _NOT_SPACE.sub(MASK, text)
        return _masked(text, pattern)

    return mask


_NOT_SPACE = re.compile(r"\S")


def _masked(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda match: MASK * len(match[0]), text)


def _contains(value: Any, mask: Mask) -> bool:
    match value:
        case str():
            return mask(value) != value
        case dict():
            return any(_contains(key, mask) or _contains(each, mask) for key, each in value.items())
        case list():
            if IMAGE_PART in value and len(value) > 1:
                return any(_contains(parts, mask) for parts in _between_images(value))
            if texts := _texts_of_parts(value):
                return any(mask(whole) != whole for whole in ("".join(texts), "".join(map(str.strip, texts))))
            return any(_contains(each, mask) for each in value)
    return False


def with_masks(value: Any, pattern: re.Pattern[str]) -> Any:
    """A value of a template's variables with all matches in its texts masked."""
    return _with_masks(value, partial(_masked, pattern=pattern))


def _with_masks(value: Any, mask: Mask) -> Any:
    match value:
        case str():
            return mask(value)
        case dict():
            return {_with_masks(key, mask): _with_masks(each, mask) for key, each in value.items()}
        case list():
            if IMAGE_PART in value and len(value) > 1:
                return [part for parts in _between_images(value) for part in _with_masks(parts, mask)]
            if texts := _texts_of_parts(value):
                masked = _masked_parts(texts, mask)
                return [part | {_text_key(part): text} for part, text in zip(value, masked, strict=True)]
            return [_with_masks(each, mask) for each in value]
    return value


def _between_images(content: list[Any]) -> list[Any]:
    """The parts of a content with images, in order: each image, and the lists of what is between them."""
    found: list[Any] = []
    for is_image, parts in itertools.groupby(content, lambda part: part == IMAGE_PART):
        group = list(parts)
        found += [[part] for part in group] if is_image else [group]
    return found


def _texts_of_parts(value: list[Any]) -> list[str]:
    """The texts of a content's parts, which a template may write without anything between; empty for other lists."""
    if not all(isinstance(part, dict) and part.keys() == {"type", _text_key(part)} for part in value):
        return []
    texts = [part[_text_key(part)] for part in value]
    return texts if all(isinstance(text, str) for text in texts) else []


def _text_key(part: dict[str, Any]) -> str:
    return "thinking" if "thinking" in part else "text"


def _masked_parts(texts: list[str], mask: Mask) -> list[str]:
    """The texts with the special tokens masked that they make together, as they are or without the space around each:
    templates do both."""
    texts = _masked_together(texts, mask)
    inner = _masked_together([text.strip() for text in texts], mask)
    begins = (len(text) - len(text.lstrip()) for text in texts)
    return [
        text[:begin] + masked + text[begin + len(masked) :]
        for text, masked, begin in zip(texts, inner, begins, strict=True)
    ]


def _masked_together(texts: list[str], mask: Mask) -> list[str]:
    whole = mask("".join(texts))
    ends = itertools.accumulate(map(len, texts))
    return [whole[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]
