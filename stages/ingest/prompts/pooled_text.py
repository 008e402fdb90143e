"""Ids of texts and of pairs of texts that a model's pooler reads: with token types, and truncated as transformers does.

A truncated text keeps the tokens that the post-processor adds, such as [CLS] and [SEP]. Of a pair, the longer text is
cut first, then both (`longest_first`). The pairs of a query with a thousand documents come one after the other, so the
query's ids are kept.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Tokenizer

from pipeline.runtime.messages import TextPrompt
from pipeline.stages.ingest.prompts.ids import Ids, as_int32
from pipeline.stages.ingest.prompts.pooled_layout import Layout

NUM_KEPT = 32
"""First texts whose ids are kept: the clients that send pairs at the same time."""


class NoRoomError(Exception):
    """Fewer ids are kept than the post-processor adds."""


class PooledText(NamedTuple):
    ids: Ids
    """int32 [n]"""
    segment_start: int
    """As in `GenerationOptions`."""


class TextIds(NamedTuple):
    """The ids of a text without those that are added."""

    ids: Ids
    """int32 [n], as many as a prompt can have. If there are more and the text must not be cut: none."""
    length: int
    """How many ids it has."""


class Truncation(NamedTuple):
    """How long texts are truncated."""

    most: int | None
    """Ids of the prompt; None if it is not truncated"""
    is_right: bool
    """Whether the first ids stay"""

    @property
    def side(self) -> str:
        return "none" if self.most is None else "right" if self.is_right else "left"

    def kept(self, num: int, length: int) -> slice:
        """Which `num` of `length` ids stay."""
        return slice(num) if self.is_right else slice(length - num, length)


class PooledTexts:
    """Encodes texts and pairs. Its methods run in any thread, and let others run."""

    def __init__(self, tokenizer: Tokenizer, max_ids: int) -> None:
        """`max_ids` bounds the ids of a prompt."""
        self._tokenizer = tokenizer
        self._max_ids = max_ids
        self._layouts: dict[tuple[bool, bool], Layout] = {}
        self._first_texts: OrderedDict[tuple[str, bytes, str], TextIds] = OrderedDict()
        self._lock = threading.Lock()

    def encode(
        self,
        prompt: TextPrompt,
        truncation: Truncation,
        scope: str = "",
        *,
        add_special_tokens: bool,
        check_num: Callable[[int], None] = lambda _: None,
    ) -> PooledText:
        """Encode a text or a pair of the client `scope`. `truncation.most` is at most `max_ids`. Without truncation,
        `check_num` must refuse more ids than `max_ids`: it is called before they are Python objects. Raises
        TokenTypesError, NoRoomError, or what the library raises."""
        layout = self._layout(prompt.pair is not None, add_special_tokens)
        if truncation.most is not None and truncation.most < layout.num_added:
            raise NoRoomError(layout.num_added)
        if prompt.pair is None and truncation.most is None and layout.has_one_type:
            (encoding,) = self._tokenizer.encode_batch_fast([prompt.text], add_special_tokens=add_special_tokens)
            check_num(len(encoding))
            return PooledText(as_int32(encoding.ids), 0)
        texts = self._ids_of(prompt, truncation, scope)
        lengths = [one.length for one in texts]
        if truncation.most is None:
            check_num(layout.length(*lengths))
            return PooledText(*layout.join([one.ids for one in texts]))
        room = truncation.most - layout.num_added
        rooms = [min(lengths[0], room)] if len(lengths) == 1 else longest_first(lengths[0], lengths[1], room)
        cut = [one.ids[truncation.kept(num, len(one.ids))] for one, num in zip(texts, rooms, strict=True)]
        return PooledText(*layout.join(cut))

    def _layout(self, is_pair: bool, add_special_tokens: bool) -> Layout:
        key = is_pair, add_special_tokens
        if (found := self._layouts.get(key)) is None:
            found = self._layouts[key] = Layout(self._tokenizer, is_pair=is_pair, add_special_tokens=add_special_tokens)
        return found

    def _ids_of(self, prompt: TextPrompt, truncation: Truncation, scope: str) -> list[TextIds]:
        """Those of its texts."""
        if prompt.pair is None:
            return self._encoded([prompt.text], truncation)
        key = scope, hashlib.blake2b(prompt.text.encode(), digest_size=16).digest(), truncation.side
        with self._lock:
            if (first := self._first_texts.get(key)) is not None:
                self._first_texts.move_to_end(key)
        if first is not None:
            return [first, *self._encoded([prompt.pair], truncation)]
        texts = self._encoded([prompt.text, prompt.pair], truncation)
        with self._lock:
            self._first_texts[key] = texts[0]
            if len(self._first_texts) > NUM_KEPT:
                self._first_texts.popitem(last=False)
        return texts

    def _encoded(self, texts: list[str], truncation: Truncation) -> list[TextIds]:
        found = []
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            length = len(encoding)
            num = min(length, self._max_ids)
            ids = [] if num < length and truncation.most is None else encoding.ids[truncation.kept(num, length)]
            found.append(TextIds(as_int32(ids), length))
        return found


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
