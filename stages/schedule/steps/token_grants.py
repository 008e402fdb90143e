"""Divides a step's budget among running rows.

    decoding rows  >  prompts by order  >  sequences that start  >  deferred prompts

Deferred are long prompts and, if the policy preempts, prompts of a higher rank than a sequence that waits. The first
deferred long prompt always gets a chunk.
"""

import numpy as np

from pipeline.stages.schedule.arrays import NO_ROWS, Bools, Int64s
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.policies.budget import BudgetLimits, StepBudget, grant_chunks, grant_decodes
from pipeline.stages.schedule.state import SchedulerState


class TokenGrants:
    """Decides how many tokens each running row computes. Changes nothing but the budget."""

    def __init__(self, state: SchedulerState, lifecycle: SequenceLifecycle) -> None:
        config = state.config
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._limits = BudgetLimits(
            config.max_num_batched_tokens,
            config.max_step_s,
            config.prompt_max_slowdown,
            config.long_prompt_max_slowdown,
            max(config.max_num_batched_tokens, config.max_num_prefill_tokens),
            config.max_whole_run,
        )
        self._media = state.media
        self._preempts = state.policy.preempts
        self._rows = state.rows
        self._lifecycle = lifecycle
        self._cost_model = state.cost_model

    def grant(
        self, order: Int64s, num_computed: Int64s, need: Int64s, total: Int64s, max_decodes: int, *, learns: bool
    ) -> tuple[StepBudget, Int64s, Int64s]:
        """Divide a step's budget among rows that lack `need` of `total` ids, of which `max_decodes` may decode. Returns
        what is left of it, the number of tokens that each row computes, and the deferred rows. `learns` says whether
        the cost model learns from a step without chunks."""
        prompts = deferred = NO_ROWS
        max_decodes = min(max_decodes, self._max_num_batched_tokens)
        if len(need) <= max_decodes and np.count_nonzero(need == 1) == len(need):
            counts, num_decodes = need, len(need)  # nearly every step
        else:
            counts = grant_decodes(need, max_decodes)
            num_decodes = int(counts.sum())
            prompts = (need > 1).nonzero()[0]
            is_deferred = self._is_deferred(order[prompts])
            prompts, deferred = prompts[~is_deferred], order[prompts[is_deferred]]
        lifecycle = self._lifecycle
        needs_context = len(prompts) > 0 or len(deferred) > 0 or lifecycle.waiting or lifecycle.swapped or learns
        context = int((total * counts).sum()) if needs_context else 0
        num_prompts = len(prompts) + len(deferred) + len(lifecycle.waiting)
        budget = StepBudget(self._limits, self._cost_model, num_decodes, context, num_prompts)
        if len(deferred) and len(longs := deferred[self._rows.is_long[deferred]]):
            budget.hold_for_long(int(self._rows.priority_key[longs[0]]))
        if len(prompts):
            counts[prompts] = self.chunks(budget, order[prompts], need[prompts], num_computed[prompts])
        return budget, counts, deferred

    def _is_deferred(self, prompts: Int64s) -> Bools:
        is_long: Bools = self._rows.is_long[prompts]
        if not self._preempts:
            return is_long
        ranks = self._rows.priority_key[prompts]
        first = self._lifecycle.first_rank()
        is_deferred: Bools = (ranks > first) | (is_long & (ranks == first))
        return is_deferred

    def chunks(self, budget: StepBudget, prompts: Int64s, need: Int64s, starts: Int64s) -> Int64s:
        """Divide a budget among these rows' prompts, by order: rank by rank."""
        ranks, is_long = self._rows.priority_key[prompts], self._rows.is_long[prompts]
        runs = self._media.runs_of_all(prompts, starts, need)
        if len(ranks) == 0 or ranks[0] == ranks[-1]:
            return grant_chunks(budget, need, starts, is_long, runs)
        counts = np.zeros(len(prompts), np.int64)
        for rank in np.unique(ranks):
            of_rank = np.flatnonzero(ranks == rank)
            some = None if runs is None else [runs[index] for index in of_rank.tolist()]
            counts[of_rank] = grant_chunks(budget, need[of_rank], starts[of_rank], is_long[of_rank], some)
        return counts
