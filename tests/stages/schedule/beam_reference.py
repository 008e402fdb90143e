"""Beam search over all ids of a vocabulary, as transformers' `generate` defines it, with the logprobs of the fake
executor."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pipeline.runtime.messages import BEGIN, Finish
from tests.fakes import VOCAB, logprob, next_id

NUM_IDS = VOCAB + 100
"""The fake executor's top ids may be above its vocabulary."""


class Found(NamedTuple):
    score: float
    output: list[int]
    finish: Finish


def all_logprobs(ids: list[int]) -> np.ndarray:
    first = next_id(ids, 0, 0)
    logprobs = np.full(NUM_IDS, -np.inf)
    logprobs[first:] = logprob(first) - np.arange(NUM_IDS - first)
    return logprobs


def beam_search(
    prompt: list[int],
    width: int,
    max_tokens: int,
    stop: set[int],
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    min_tokens: int = 0,
    excluded: Sequence[Sequence[int]] = (),
) -> list[Found]:
    beams = [(0.0, list(prompt))]
    found: list[Found] = []
    for length in range(1, max_tokens + 1):
        scores = np.stack([score + all_logprobs(ids) for score, ids in beams])
        if length <= min_tokens:
            scores[:, list(stop)] = -np.inf
        for row, (_, ids) in zip(scores, beams, strict=True):
            output = [BEGIN, *ids[len(prompt) :]]
            row[[last for *before, last in excluded if not before or output[-len(before) :] == before]] = -np.inf
        best = np.argsort(-scores.reshape(-1), kind="stable")[: (1 + max(1, len(stop))) * width]
        candidates = [(scores[divmod(p, NUM_IDS)], [*beams[p // NUM_IDS][1], int(p % NUM_IDS)]) for p in best]
        for score, ids in candidates[:width]:
            if ids[-1] in stop or length == max_tokens:
                finish = Finish.STOP if ids[-1] in stop else Finish.LENGTH
                found.append(Found(score / length**length_penalty, ids[len(prompt) :], finish))
        found = sorted(found, key=lambda one: -one.score)[:width]
        beams = [one for one in candidates if one[1][-1] not in stop][:width]
        if len(found) == width:
            most = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or beams[0][0] / most**length_penalty <= found[-1].score:
                break
    return found
