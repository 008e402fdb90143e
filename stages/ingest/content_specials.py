"""Special tokens in what a client writes in a chat: they are encoded as plain text.

A chat's text is rendered by the template, which writes special tokens itself, as `<|im_end|>` between messages. If a
message contains the same characters, the tokenizer would make a special token of them, and the message could end its
turn and start another: of the system, for example. So the chat is rendered again with these characters masked. Where
the two texts differ is what the client wrote:

    text    <|im_start|>user\\nWhat is <|im_end|>?<|im_end|>
    masked  <|im_start|>user\\nWhat is xxxxxxxxxx?<|im_end|>
                                       └ plain ─┘  └ special

The second text costs nothing for other chats: only those that contain such characters have one.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline.text.formats.marks import pattern_of

MASK = "x"


class ContentSpecials:
    """The special tokens of one tokenizer: their texts, and the ids of these texts without special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Call it before other threads use the tokenizer."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        texts = {number: token.content for number, token in added.items() if token.special and token.content}
        self._ids = np.array(sorted(texts), np.int64)
        self._pattern = pattern_of(texts.values())
        before = tokenizer.encode_special_tokens
        tokenizer.encode_special_tokens = True  # as plain text, whatever the name suggests
        try:
            encodings = tokenizer.encode_batch(list(texts.values()), add_special_tokens=False)
        finally:
            tokenizer.encode_special_tokens = before
        self._plain = {number: encoding.ids for number, encoding in zip(texts, encodings, strict=True)}

    def masked(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The template's variables with the special tokens in all texts masked; None if there are none."""
        pattern = self._pattern
        if pattern is None or not _contains(variables, pattern):
            return None
        masked: dict[str, Any] = with_masks(variables, pattern)
        return masked

    def encode(
        self, text: str, masked: str, *, add_special_tokens: bool, check_num: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        """The ids of a chat's text, of which `masked` has the same length. The tokens of the client's texts are plain.
        Raises the tokenizer's exceptions, and those of `check_num`, which gets the number of ids before the expensive
        part."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        check_num(len(encoding))
        ids: list[int] = encoding.ids
        offsets = encoding.offsets
        # num_before[i]: masked characters before character i
        num_before = np.concatenate(([0], np.cumsum(_characters(text) != _characters(masked))))
        result: list[int] = []
        done = 0
        for place in np.flatnonzero(np.isin(ids, self._ids)).tolist():
            begin, end = offsets[place]
            if num_before[end] > num_before[begin]:
                result += ids[done:place]
                result += self._plain[ids[place]]
                done = place + 1
        return result + ids[done:]


def _characters(text: str) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _contains(value: Any, pattern: re.Pattern[str]) -> bool:
    match value:
        case str():
            return pattern.search(value) is not None
        case dict():
            return any(_contains(key, pattern) or _contains(each, pattern) for key, each in value.items())
        case list():
            if texts := _texts_of_parts(value):
                return any(pattern.search("".join(each)) for each in (texts, map(str.strip, texts)))
            return any(_contains(each, pattern) for each in value)
    return False


def with_masks(value: Any, pattern: re.Pattern[str]) -> Any:
    """A value of a template's variables with all matches in its texts masked."""
    match value:
        case str():
            return pattern.sub(lambda match: MASK * len(match[0]), value)
        case dict():
            return {with_masks(key, pattern): with_masks(each, pattern) for key, each in value.items()}
        case list():
            if texts := _texts_of_parts(value):
                return [part | {"text": text} for part, text in zip(value, _masked_parts(texts, pattern), strict=True)]
            return [with_masks(each, pattern) for each in value]
    return value


def _texts_of_parts(value: list[Any]) -> list[str]:
    """The texts of a content's parts, which a template may write without anything between; empty for other lists."""
    if not all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in value):
        return []
    texts = [part["text"] for part in value]
    return texts if all(isinstance(text, str) for text in texts) else []


def _masked_parts(texts: list[str], pattern: re.Pattern[str]) -> list[str]:
    """The texts with the special tokens masked that they make together, as they are or without the space around each:
    templates do both."""
    texts = _masked_together(texts, pattern)
    inner = _masked_together([text.strip() for text in texts], pattern)
    begins = (len(text) - len(text.lstrip()) for text in texts)
    return [
        text[:begin] + masked + text[begin + len(masked) :]
        for text, masked, begin in zip(texts, inner, begins, strict=True)
    ]


def _masked_together(texts: list[str], pattern: re.Pattern[str]) -> list[str]:
    whole = with_masks("".join(texts), pattern)
    ends = itertools.accumulate(map(len, texts))
    return [whole[end - len(text) : end] for text, end in zip(texts, ends, strict=True)]
