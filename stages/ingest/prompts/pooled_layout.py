"""Where the post-processor of a tokenizer puts the ids of one or two texts, and what it adds, such as [CLS] and [SEP].

It is asked once, with marks for texts. What it returns for two long texts that were truncated has each part of one
joined with each part of the other: for texts of 16,000 tokens it takes 2 s.
"""

import itertools
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer, models

from pipeline.stages.ingest.prompts.ids import Ids

FIRST, SECOND = 2**32 - 1, 2**32 - 2
"""Ids that stand for the texts. No vocabulary has them: ids are int32."""
TEXTS = {FIRST: 0, SECOND: 1}


class TokenTypesError(Exception):
    """The post-processor gives token types that are not those of a first and a second text."""


class Piece(NamedTuple):
    """Ids of one type that the post-processor adds, or one of the texts."""

    added: Ids | None
    """int32 [n]; None for a text"""
    text: int
    """0 or 1"""
    token_type: int


class Layout:
    """That of texts alone, or of pairs."""

    def __init__(self, tokenizer: Tokenizer, *, is_pair: bool, add_special_tokens: bool) -> None:
        """Raises what the library raises, or OverflowError if it adds an id above int32."""
        first, second = marks()
        joined = tokenizer.post_process(first, second if is_pair else None, add_special_tokens)
        self._pieces: list[Piece] = []
        added = zip(joined.ids, joined.type_ids, strict=True)
        for (token_type, text), run in itertools.groupby(added, lambda one: (one[1], TEXTS.get(one[0]))):
            ids = [token_id for token_id, _ in run]
            if text is None:
                self._pieces.append(Piece(np.array(ids, np.int32), 0, token_type))
            else:
                self._pieces += [Piece(None, text, token_type)] * len(ids)
        self.num_added = sum(len(one.added) for one in self._pieces if one.added is not None)
        self.has_one_type = all(one.token_type == 0 for one in self._pieces)

    def length(self, *lengths: int) -> int:
        """How many ids texts of these lengths become."""
        return self.num_added + sum(lengths[one.text] for one in self._pieces if one.added is None)

    def join(self, texts: list[Ids]) -> tuple[Ids, int]:
        """The ids of the texts with what is added, and where the second token type begins, as `segment_start` in
        `GenerationOptions`. Raises TokenTypesError."""
        parts = [texts[one.text] if one.added is None else one.added for one in self._pieces]
        joined = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return joined, 0 if self.has_one_type else self._segment_start(list(map(len, parts)))

    def _segment_start(self, lengths: list[int]) -> int:
        position = start = 0
        for one, length in zip(self._pieces, lengths, strict=True):
            if length and one.token_type == 1 and not start:
                start = position
                if not start:
                    raise TokenTypesError
            elif length and one.token_type != (1 if start else 0):
                raise TokenTypesError
            position += length
        return start


def marks() -> list[Encoding]:
    """An encoding of the id FIRST, and one of SECOND."""
    tokenizer = Tokenizer(models.WordLevel({"1": FIRST, "2": SECOND}, "1"))
    return tokenizer.encode_batch_fast(["1", "2"], add_special_tokens=False)
