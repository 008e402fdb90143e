"""The budget of one step: tokens, and time as predicted from earlier steps.

Decoding rows come first and are never held back. The rest goes to prompts, in chunks:

    tokens    at most `max_num_batched_tokens` in total, or `max_num_prefill_tokens` while none decodes
    time      while others decode, the step should take at most `max_step_s`
    slowdown  while others decode, parts of prompts make a step at most `max_slowdown` times as long, and parts of long
              prompts `long_max_slowdown` times

While few sequences decode, those whose prompts are not computed get at least the share of a step's time that they have
of the open sequences: the first one that decodes must not hold back the many that arrived with it. The more decode, the
less each of them may be slowed down for that, down to `max_slowdown` for FEW_DECODES.

The time bounds never cut the first chunk of a step below MIN_CHUNK tokens, so prompts progress on a machine of any
speed. A prompt that would lack only a little more is completed (COMPLETION), because another step costs it more. One
that needs several steps gets chunks of about the same size: these take as many steps as larger ones and a small rest.

Texts of an encoder are not cut: they get all their tokens or none. The first of a step may have more than the budget.
Nor are runs of positions that see each other: a chunk ends before or behind one. If one begins a chunk, this is the
first of a step, or a sure one, or the run fits.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.runtime.messages import MAX_RUNS_BEYOND
from pipeline.stages.schedule.arrays import Bools, Int64s
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel

MIN_CHUNK = 16
"""Fewer tokens than this take hardly less time."""

FEW_DECODES = 8
"""With as many rows that decode, or more, waiting prompts don't raise `max_slowdown`."""

COMPLETION = 0.1
"""A step may take this share longer than a slowdown allows, if that completes a prompt."""

UNLIMITED = float("inf")

Runs = Sequence[tuple[int, int]]
"""Begins and ends of runs that are not cut, in order, as numbers of positions behind the first one of a chunk. If that
is within a run, its begin is at most 0."""
NO_RUNS: Runs = ()


def uncut(count: int, runs: Runs) -> int:
    """The most positions of a chunk, up to `count`, that end within no run; 0 if it begins with a longer one."""
    for begin, end in runs:
        if begin < count < end:
            return max(0, begin)
    return count


def first_run(runs: Runs) -> int:
    """The positions of the run that a chunk begins with; 0 without one."""
    return runs[0][1] if runs and runs[0][0] <= 0 else 0


class StepCostInputs(msgspec.Struct):
    """The numbers that a step's time depends on."""

    num_decodes: int = 0
    context: int = 0
    """Tokens that the decoding rows attend to, in total."""
    num_chunk_tokens: int = 0
    pairs: float = 0.0
    """(query, key) pairs of the chunks, in total."""

    def add_chunk(self, start: int, count: int, *, whole: bool = False) -> None:
        """Tokens of a `whole` text see all of it."""
        self.num_chunk_tokens += count
        self.pairs += count * (start + (count if whole else count / 2))


class BudgetLimits(msgspec.Struct, frozen=True):
    """The settings of a step's budget."""

    tokens: int
    step_s: float = UNLIMITED
    max_slowdown: float = UNLIMITED
    long_max_slowdown: float = UNLIMITED
    prefill_tokens: int = 0
    """Of a step in which no row decodes; at least `tokens`, or 0 for as many."""
    run_tokens: int = 0
    """Of the longest run that is not cut. The first chunk of a step may exceed the other limits by so many, and sure
    ones by what is left of MAX_RUNS_BEYOND times as many."""


class StepBudget:
    """What is left of one step's budget. `shape` is what was granted."""

    def __init__(
        self, limits: BudgetLimits, cost_model: StepCostModel, num_decodes: int, context: int, num_prompts: int = 1
    ) -> None:
        """`num_prompts` sequences wait for their first token."""
        self.shape = StepCostInputs(num_decodes, context)
        self.tokens = limits.tokens - num_decodes if num_decodes else limits.prefill_tokens or limits.tokens
        self._cost_model = cost_model
        self._beyond = MAX_RUNS_BEYOND * limits.run_tokens
        self._held = 0
        self._held_s = 0.0
        self._long_rank = UNLIMITED
        self._base_s = self._completion_s = 0.0
        self._left_s = self._long_left_s = UNLIMITED
        least = min(limits.step_s, limits.max_slowdown, limits.long_max_slowdown)
        self._is_timed = num_decodes > 0 and cost_model.is_known and least < UNLIMITED
        if self._is_timed:
            self._base_s = cost_model.predict(num_decodes, context, 0, 0.0)
            share = min(1 + num_prompts / num_decodes, limits.max_slowdown * FEW_DECODES / num_decodes)
            slowdown = max(limits.max_slowdown, share)
            self._left_s = min(limits.step_s - self._base_s, self._base_s * (slowdown - 1))
            self._long_left_s = self._base_s * (limits.long_max_slowdown - 1)
            limit_s = self._base_s + self._left_s
            self._completion_s = max(0.0, min(limits.step_s - limit_s, COMPLETION * limit_s))

    def hold_for_long(self, rank: int) -> None:
        """Reserve a chunk for the first deferred long prompt, and let no other long prompt of its rank or a higher one
        start."""
        self._long_rank = rank
        self._held = max(0, min(MIN_CHUNK, (self.tokens + 1) // 2))
        self.tokens -= self._held
        self._hold_s(self._cost_model.prefill_s(0, self._held))

    def release_held(self) -> None:
        """Return the reserved chunk to the budget: it is the deferred prompts' turn."""
        self.tokens += self._held
        self._held = 0
        self._hold_s(0.0)
        self._long_rank = UNLIMITED

    def _hold_s(self, seconds: float) -> None:
        """Reserve as much time for deferred prompts, instead of what is reserved now."""
        self._left_s += self._held_s - seconds
        self._held_s = seconds

    def has_room_for_long(self, rank: int) -> bool:
        """Whether a long prompt of this rank may start."""
        return rank < self._long_rank and self.has_room(True)

    def has_room(self, is_long: bool) -> bool:
        """Whether a prompt may get a chunk. The first prompt always may."""
        left_s = min(self._left_s, self._long_left_s) if is_long else self._left_s
        return self.tokens > 0 and (left_s > 0 or not self.shape.num_chunk_tokens)

    def fits(self, num_tokens: int) -> bool:
        """Whether a text of as many tokens may be computed whole. The first prompt always may."""
        return self.has_room(False) and (num_tokens <= self.tokens or not self.shape.num_chunk_tokens)

    def chunk(
        self,
        start: int,
        need: int,
        is_long: bool,
        reserve: int = 0,
        is_sure: bool = False,
        whole: bool = False,
        runs: Runs = NO_RUNS,
    ) -> int:
        """Grant a row up to `need` tokens from position `start` on, and return how many; with `whole`, all or none.
        `need` ends within none of the `runs`, and neither does what is granted. `reserve` tokens are left for others.
        With `is_sure` the row gets something while there are tokens, even if no time is left."""
        first, is_sure_or_first = first_run(runs), is_sure or not self.shape.num_chunk_tokens
        if whole:
            most = need if self.fits(need) else 0
        else:
            most = min(need, self.tokens - reserve)
        if most <= 0 or not (is_sure or self.has_room(is_long)):
            return 0
        if most < first:
            if not is_sure_or_first or first > self.tokens - reserve + self._beyond:
                return 0
            most = first
        most = uncut(most, runs)
        if self._is_timed:
            least = max(MIN_CHUNK, first) if is_sure_or_first else 0
            most = self._fitting(start, most, is_long, least, runs, whole=whole, completes=most == need)
        beyond = max(0, most - (self.tokens - reserve)) if runs else 0
        self._beyond -= beyond
        self.tokens -= most - beyond
        self.shape.add_chunk(start, most, whole=whole)
        return most

    def _fitting(
        self, start: int, most: int, is_long: bool, least: int, runs: Runs, *, whole: bool, completes: bool
    ) -> int:
        """Limit a chunk that is not `whole` to the time that is left, but not below `least` tokens, unless it would end
        within one of the `runs`, and take its time from the budget. A chunk that `completes` its prompt may take a
        little longer."""
        left_s = min(self._left_s, self._long_left_s) if is_long else self._left_s
        if left_s < UNLIMITED and not whole:
            shape = self.shape
            fitting = self._cost_model.max_chunk(self._base_s + left_s, shape.num_decodes, shape.context, start, most)
            if fitting < most:
                if not (completes and self._cost_model.prefill_s(start, most) <= left_s + self._completion_s):
                    even = -(-most // -(-most // fitting)) if completes and fitting else fitting
                    most = uncut(max(even, min(most, least)), runs)
                if most >= fitting:  # the rest of the time is too short for another chunk
                    self._long_left_s = 0.0
                    if left_s == self._left_s:
                        self._left_s = 0.0
        seconds = self._cost_model.prefill_s(start, most)
        self._left_s -= seconds
        self._long_left_s -= seconds
        return most


def grant_decodes(need: Int64s, budget: int) -> Int64s:
    """Which rows decode: int64 [rows], 1 for rows that need one token, at most `budget` of them, 0 for the others.

    Decoding rows come before all chunks, by order, so a long prompt never stalls running streams.
    """
    decoding = need == 1
    return np.asarray(decoding * (decoding.cumsum() <= budget), np.int64)


def grant_chunks(
    budget: StepBudget, need: Int64s, starts: Int64s, is_long: Bools, runs: Sequence[Runs] | None = None
) -> Int64s:
    """Divide a budget among running prompts: the short ones by order, then the long ones. The first long prompt always
    gets a chunk, so a stream of short prompts can't starve it.

    Args:
        budget: the chunks are taken from it.
        need: int64 [rows], the tokens that each row lacks, in order.
        starts: int64 [rows], the first position to compute.
        is_long: bool [rows].
        runs: for each row those among the tokens that it lacks.

    Returns:
        int64 [rows], at most `need` each.
    """
    counts = np.zeros(len(need), np.int64)
    reserve = min(MIN_CHUNK, int(need[is_long][0]), (budget.tokens + 1) // 2) if is_long.any() else 0
    for row in np.flatnonzero(~is_long).tolist():
        uncut_runs = NO_RUNS if runs is None else runs[row]
        counts[row] = budget.chunk(int(starts[row]), int(need[row]), False, reserve, runs=uncut_runs)
    for index, row in enumerate(np.flatnonzero(is_long).tolist()):
        uncut_runs = NO_RUNS if runs is None else runs[row]
        counts[row] = budget.chunk(int(starts[row]), int(need[row]), True, is_sure=index == 0, runs=uncut_runs)
    return counts
