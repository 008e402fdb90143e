"""Outputs of tokens with logprobs, as the stages send them."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from pipeline.runtime.token_outputs import logprob_dtype

TEXT = "aé😀"


def token_outputs(*scores: float, top: list[tuple[int, float]] | None = None) -> bytes:
    """Records of ids with these log probabilities, all with the same top ids."""
    table = np.zeros(len(scores), logprob_dtype(len(top or [])))
    table["logprob"] = scores
    if top:
        table["top_ids"] = [one for one, _ in top]
        table["top_logprobs"] = [score for _, score in top]
    return table.tobytes()


def with_tops(pieces: list[bytes], *tops: bytes) -> list[bytes]:
    return [named for piece in pieces for named in (piece, *tops)]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [*chain.from_iterable(lists)]
