"""Ids of texts and of pairs of texts that a model's pooler reads: with token types, and truncated as transformers does.

A truncated text keeps the tokens that the post-processor adds, such as [CLS] and [SEP]. Of a pair, the longer text is
cut first, then both (`longest_first`).
"""

from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from pipeline.runtime.messages import TextPrompt


class TokenTypesError(Exception):
    """The post-processor gives token types that are not those of a first and a second text."""


class NoRoomError(Exception):
    """Fewer ids are kept than the post-processor adds."""


class PooledText(NamedTuple):
    ids: list[int]
    segment_start: int
    """As in `GenerationOptions`."""


def encode(
    tokenizer: Tokenizer,
    prompt: TextPrompt,
    *,
    add_special_tokens: bool,
    most: int | None,
    truncates_right: bool,
    check_num: Callable[[int], None] = lambda _: None,
) -> PooledText:
    """Encode a text or a pair. Keeps at most `most` ids, if it is given: the first, or the last. `check_num` may refuse
    the number of ids before they are Python objects. Lets other threads run. Raises TokenTypesError,
    NoRoomError, or what the library raises."""
    if most is None:
        given = prompt.text if prompt.pair is None else (prompt.text, prompt.pair)
        (encoding,) = tokenizer.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        check_num(len(encoding))
        return _result(encoding)
    texts = [prompt.text] if prompt.pair is None else [prompt.text, prompt.pair]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    num_added = tokenizer.num_special_tokens_to_add(prompt.pair is not None) if add_special_tokens else 0
    if (room := most - num_added) < 0:
        raise NoRoomError(num_added)
    rooms = [room] if prompt.pair is None else longest_first(len(encodings[0]), len(encodings[1]), room)
    for encoding, length in zip(encodings, rooms, strict=True):
        encoding.truncate(length, 0, "right" if truncates_right else "left")
    joined = tokenizer.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None, add_special_tokens)
    return _result(joined)


def longest_first(first: int, second: int, room: int) -> list[int]:
    """How many tokens of two texts are kept, of `first` and `second`, so that `room` is enough for both."""
    if first + second <= room:
        return [first, second]
    short = min(first, second)
    if short > room - short:
        short = room // 2
        long = room - short
    else:
        long = room - short
    return [short, long] if first <= second else [long, short]


def _result(encoding: Encoding) -> PooledText:
    types: list[int] = encoding.type_ids
    start = types.index(1) if 1 in types else 0
    if types != [0] * (start or len(types)) + [1] * (len(types) - start if start else 0):
        raise TokenTypesError
    return PooledText(encoding.ids, start)
