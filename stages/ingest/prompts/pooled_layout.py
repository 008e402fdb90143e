"""Where the post-processor of a tokenizer puts the ids of one or two texts, and what it adds, such as [CLS] and [SEP].

It is asked once, with marks for texts. What it returns for two long texts that were truncated has each part of one
joined with each part of the other: for texts of 16,000 tokens it takes 2 s.
"""

from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer, models

from pipeline.stages.ingest.prompts.ids import Ids

FIRST, SECOND = 2**32 - 1, 2**32 - 2
"""Ids that stand for the texts. No vocabulary has them: ids are int32."""


class TokenTypesError(Exception):
    """The post-processor gives token types that are not those of a first and a second text."""


class Piece(NamedTuple):
    """Ids that the post-processor adds, or one of the texts."""

    added: Ids | None
    """int32 [n]; None for a text"""
    text: int
    """0 or 1"""
    token_type: int

    def ids_of(self, texts: list[Ids]) -> Ids:
        return texts[self.text] if self.added is None else self.added


class Layout:
    """That of texts alone, or of pairs."""

    def __init__(self, tokenizer: Tokenizer, *, is_pair: bool, add_special_tokens: bool) -> None:
        """Raises what the library raises, or OverflowError if it adds an id above int32."""
        first, second = marks()
        joined = tokenizer.post_process(first, second if is_pair else None, add_special_tokens)
        self._pieces = [
            Piece(None, int(id_ == SECOND), token_type)
            if id_ in (FIRST, SECOND)
            else Piece(np.array([id_], np.int32), 0, token_type)
            for id_, token_type in zip(joined.ids, joined.type_ids, strict=True)
        ]
        self.num_added = sum(one.added is not None for one in self._pieces)

    def length(self, *lengths: int) -> int:
        """How many ids texts of these lengths become."""
        return self.num_added + sum(lengths[one.text] for one in self._pieces if one.added is None)

    def join(self, texts: list[Ids]) -> tuple[Ids, int]:
        """The ids of the texts with what is added, and where the second token type begins, as `segment_start` in
        `GenerationOptions`. Raises TokenTypesError."""
        parts: list[Ids] = []
        position = start = 0
        for one in self._pieces:
            ids = one.ids_of(texts)
            if not len(ids):
                continue
            if one.token_type == 1 and not start:
                start = position
                if not start:
                    raise TokenTypesError
            elif one.token_type != (1 if start else 0):
                raise TokenTypesError
            parts.append(ids)
            position += len(ids)
        return (np.concatenate(parts) if parts else np.zeros(0, np.int32)), start


def marks() -> list[Encoding]:
    """An encoding of the id FIRST, and one of SECOND."""
    tokenizer = Tokenizer(models.WordLevel({"1": FIRST, "2": SECOND}, "1"))
    return tokenizer.encode_batch_fast(["1", "2"], add_special_tokens=False)
