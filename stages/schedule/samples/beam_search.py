"""Beam search: which continuations of a request's beams are kept. Pure.

    beams           the n running sequences, one at first
    candidates      each beam's likeliest next ids, as in the executor's token outputs
    hypotheses      the n best finished sequences so far

    candidates, best first  ── the first n that end ──►  hypotheses
                            └─ the first n others ────►  beams

The score of a beam is the sum of its ids' logprobs; that of a hypothesis is this sum divided by
length ** length_penalty. All rules are those of transformers' `generate`. A beam's n + (number of stop ids and of
ids that the model excludes) likeliest ids are enough: no more than n of them continue, and no more than n of them end.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.runtime.messages import BEGIN, Finish, GenerationOptions
from pipeline.runtime.token_outputs import logprob_bytes, logprob_dtype
from pipeline.stages.schedule.arrays import Ids


class Beam(NamedTuple):
    """A running sequence."""

    slot: int
    """The index of the request's sequence that computes it."""
    score: float = 0.0
    token_outputs: bytes = b""
    """Token outputs of its output, as the client gets them."""


class Continuation(NamedTuple):
    """A beam and its next id."""

    parent: Beam
    token_id: int
    score: float
    token_output: bytes
    """The id's token output; empty if the client gets none."""

    @property
    def token_outputs(self) -> bytes:
        return self.parent.token_outputs + self.token_output


class Move(NamedTuple):
    """The sequence with index `slot` continues that with index `parent`: itself, or a beam that it takes over."""

    slot: int
    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """A finished sequence."""

    score: float
    ids: Ids
    """int32: prompt and output"""
    token_outputs: bytes
    finish: Finish


class BeamSearch:
    """The state of one request's search. A step of it begins when every beam has its token output: see `take`."""

    def __init__(self, options: GenerationOptions, num_prompt: int, limit: int, eos_ids: Collection[int]) -> None:
        """`limit` is the number of ids, prompt included, at which a sequence ends."""
        self.width = options.n
        self.stop_ids = frozenset(options.stop_token_ids).union(() if options.ignore_eos else eos_ids)
        self._excluded = frozenset(run[0] for run in options.bad_words_ids if len(run) == 1)
        self._excluded_runs = [run for run in options.bad_words_ids if len(run) > 1]
        lasts = (run[-1] for run in options.bad_words_ids)
        self._num_candidates = self.width + len(self.stop_ids.union(lasts))
        self.num_top = max(self._num_candidates, options.num_logprobs)
        """Top logprobs that the executor returns for each beam."""
        self.beams = [Beam(0)]
        """The best first."""
        self.hypotheses: list[Hypothesis] = []
        """The best first."""
        self._options = options
        self._num_prompt = num_prompt
        self._limit = limit
        self._dtype = logprob_dtype(self.num_top)
        self._token_outputs: dict[int, tuple[int, bytes]] = {}

    @property
    def sampled_ids(self) -> dict[int, int]:
        """What the executor has sampled for the beams that have their token output, by index."""
        return {index: token_id for index, (token_id, _) in self._token_outputs.items()}

    @property
    def token_output_bytes(self) -> int:
        """Bytes of the executor's token output."""
        return logprob_bytes(self.num_top)

    def take(self, index: int, token_id: int, token_output: bytes) -> bool:
        """Note what the executor sampled for a beam, and its token output. A beam that was preempted may be computed
        twice. Returns whether every beam has its token output."""
        self._token_outputs[index] = token_id, token_output
        return len(self._token_outputs) == len(self.beams)

    def step(self, num_ids: int, ids_of: Callable[[int], Ids]) -> list[Move]:
        """Choose the next beams. Each has `num_ids` ids; `ids_of` returns those of a sequence. Returns what every
        sequence continues, empty if the search is over."""
        token_outputs, self._token_outputs = self._token_outputs, {}
        candidates = self._candidates(token_outputs, num_ids + 1 - self._num_prompt, ids_of)
        is_last = num_ids + 1 == self._limit
        for candidate in candidates[: self.width]:
            if is_last or candidate.token_id in self.stop_ids:
                self._finish(candidate, ids_of)
        running = [candidate for candidate in candidates if candidate.token_id not in self.stop_ids][: self.width]
        if is_last or not running or self._is_over(running[0].score, num_ids + 1 - self._num_prompt):
            return []
        moves = _moves(running, self.width, token_outputs)
        self.beams = [Beam(move.slot, one.score, one.token_outputs) for move, one in zip(moves, running, strict=True)]
        return moves

    def _candidates(
        self, token_outputs: dict[int, tuple[int, bytes]], length: int, ids_of: Callable[[int], Ids]
    ) -> list[Continuation]:
        """Continuations of all beams to `length` output ids, the best first. Of equally good ones, that of the better
        beam comes first."""
        no_end: Collection[int] = self.stop_ids if length <= self._options.min_tokens else ()
        candidates = []
        for beam in self.beams:
            token_output = np.frombuffer(token_outputs[beam.slot][1], self._dtype)[0]
            top_ids, logprobs = token_output["top_ids"], token_output["top_logprobs"]
            excluded = self._excluded.union(no_end, self._runs_after(ids_of(beam.slot)))
            most = self._num_candidates
            for token_id, logprob in zip(top_ids[:most].tolist(), logprobs[:most].tolist(), strict=True):
                if token_id >= 0 and token_id not in excluded:
                    own = self._token_output(logprob, top_ids, logprobs)
                    candidates.append(Continuation(beam, token_id, beam.score + logprob, own))
        candidates.sort(key=lambda one: -one.score)
        return candidates

    def _runs_after(self, ids: Ids) -> Iterator[int]:
        """The last ids of the runs that these ids begin."""
        if self._excluded_runs:
            output = [BEGIN, *ids[self._num_prompt :].tolist()]
            yield from (run[-1] for run in self._excluded_runs if output[1 - len(run) :] == run[:-1])

    def _token_output(self, logprob: float, top_ids: Ids, logprobs: "np.ndarray[Any, Any]") -> bytes:
        num_top = self._options.num_logprobs
        if num_top < 0:
            return b""
        return np.float32(logprob).tobytes() + top_ids[:num_top].tobytes() + logprobs[:num_top].tobytes()

    def _finish(self, candidate: Continuation, ids_of: Callable[[int], Ids]) -> None:
        ids = np.append(ids_of(candidate.parent.slot), np.int32(candidate.token_id)).astype(np.int32)
        score = self._penalized(candidate.score, len(ids) - self._num_prompt)
        finish = Finish.STOP if candidate.token_id in self.stop_ids else Finish.LENGTH
        self.hypotheses.append(Hypothesis(score, ids, candidate.token_outputs, finish))
        self.hypotheses.sort(key=lambda one: -one.score)
        del self.hypotheses[self.width :]

    def _is_over(self, best_score: float, length: int) -> bool:
        """Whether the search ends with output of this length, if the best beam that goes on has this score."""
        if len(self.hypotheses) < self.width:
            return False
        early_stopping, length_penalty = self._options.early_stopping, self._options.length_penalty
        if early_stopping is True:
            return True
        if early_stopping == "never" and length_penalty > 0:
            length = self._limit - self._num_prompt
        return self._penalized(best_score, length) <= self.hypotheses[-1].score

    def _penalized(self, score: float, length: int) -> float:
        return score / float(length**self._options.length_penalty)


def row_options(options: GenerationOptions, search: BeamSearch) -> GenerationOptions:
    """The executor's options for the beams: greedy, without stop ids, and with the token outputs that the search
    needs."""
    return msgspec.structs.replace(
        options,
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=[],
        min_tokens=0,
        num_logprobs=search.num_top,
        predicted_ids=b"",
    )


def _moves(running: Sequence[Continuation], width: int, token_outputs: dict[int, tuple[int, bytes]]) -> list[Move]:
    """Which sequence computes each of the new beams. A beam that goes on keeps its sequence for one continuation, if
    possible for the id that the executor sampled: then it changes nothing. The others take those of beams that end."""
    kept: dict[int, int] = {}
    for position, one in enumerate(running):
        parent = one.parent.slot
        if parent not in kept or one.token_id == token_outputs[parent][0]:
            kept[parent] = position
    by_position = {position: index for index, position in kept.items()}
    free = iter([index for index in range(width) if index not in kept])
    return [
        Move(by_position[position] if position in by_position else next(free), one.parent.slot, one.token_id)
        for position, one in enumerate(running)
    ]
