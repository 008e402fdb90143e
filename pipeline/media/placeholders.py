"""Puts images into a prompt.

    rendered   <|im_start|>User:<image>What is it?
    replaced   <|im_start|>User:<fake><global-img><image><fake>What is it?    each run of row tokens is one token
    ids        … 49189 49152 49190 49190 … 49190 49189 …                      expanded: one id for each row

The text is replaced before it is encoded, because tokenizers merge what stands around an image ("\\n\\n" of Gemma 3)
with the text beside it. A client's own special tokens are plain text in the ids (content_specials.py in ingest), so
each row token in them is one of an image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int32]]


class WrongCount(ValueError):
    """A rendered chat has another number of placeholders than there are images."""

    def __init__(self, num_found: int, num_images: int) -> None:
        super().__init__(f"the rendered chat has {num_found} placeholders for {num_images} images")
        self.num_found, self.num_images = num_found, num_images


class Run(NamedTuple):
    """Positions of a prompt that get rows of embeddings in place of those of its ids."""

    offset: int
    """The first of them."""
    length: int


def replace(text: str, masked: str | None, placeholder: str, texts: Sequence[str]) -> tuple[str, str | None]:
    """Replace the placeholders of a rendered chat with the texts of its images, in order. `masked` is the same chat
    with the client's special tokens masked, None if it has none; only placeholders in it count. Raises WrongCount."""
    pieces = (text if masked is None else masked).split(placeholder)
    if len(pieces) - 1 != len(texts):
        raise WrongCount(len(pieces) - 1, len(texts))
    replaced = _joined(pieces, texts)
    if masked is None:
        return replaced, None
    own, begin = [], 0
    for piece in pieces:
        own.append(text[begin : begin + len(piece)])
        begin += len(piece) + len(placeholder)
    return _joined(own, texts), replaced


def _joined(pieces: Sequence[str], texts: Sequence[str]) -> str:
    return pieces[0] + "".join(text + piece for text, piece in zip(texts, pieces[1:], strict=True))


def expand(ids: Ids, row_id: int, run_lengths: Sequence[int]) -> tuple[Ids, list[Run]]:
    """The ids of a prompt with each row token as many times as its run is long, and where these runs are. Raises
    WrongCount if there is another number of row tokens."""
    at = np.flatnonzero(ids == row_id)
    if len(at) != len(run_lengths):
        raise WrongCount(len(at), len(run_lengths))
    lengths = np.array(run_lengths, np.int64)
    counts = np.ones(len(ids), np.int64)
    counts[at] = lengths
    begins = at + np.concatenate(([0], np.cumsum(lengths - 1)))[:-1] if len(at) else at
    runs = [Run(begin, length) for begin, length in zip(begins.tolist(), run_lengths, strict=True)]
    return np.repeat(ids, counts), runs
