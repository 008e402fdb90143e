"""Arrays of token ids, and encoded prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.media.placeholders import Run
from pipeline.runtime.messages import Failure, IdsPrompt, Prompt
from pipeline.runtime.transport.arrays import Arrays
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.text.formats.reasoning import ReasoningStage

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]
PART_IDS = 65536
"""Ids that are converted at a time: about 2 ms."""


def as_int32(ids: list[int]) -> Ids:
    """A list as an array. It is made in parts, between which other threads run. Raises OverflowError."""
    if len(ids) <= PART_IDS:
        return np.array(ids, np.int32)
    parts = [np.array(ids[begin : begin + PART_IDS], np.int32) for begin in range(0, len(ids), PART_IDS)]
    return np.concatenate(parts)


class EncodedPrompt(NamedTuple):
    ids: Ids
    """int32 [n]"""
    reply_stage: ReasoningStage | None = None
    """How the reply to a chat begins, if it was asked for."""
    image_runs: Sequence[Sequence[Run]] = ()
    """Of each image of a chat: the positions that get rows of embeddings."""


def given_ids(prompt: Prompt, arrays: Arrays) -> Ids | None:
    """The ids that a client has given as its prompt; None for other prompts. Raises RequestRejected."""
    if not isinstance(prompt, IdsPrompt):
        return None
    if isinstance(prompt.ids, bytes) and len(prompt.ids) % 4:
        raise RequestRejected(Failure(400, "the prompt's ids are not packed int32", "prompt"))
    return arrays.take(prompt.ids, np.int32)
