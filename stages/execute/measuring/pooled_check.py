"""Computes a model that makes embeddings, scores or labels in every way that a scheduler may use, for comparison: each
text alone, and several in a step; of decoders also in chunks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.cli.check.cases import CheckPlan, ComputedCase, ProgramResults
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring.planned import Entry, row_add, step, take

CHUNK = 33
"""As in check.py."""


class PooledComparison:
    """Computes a plan in each way, keeping the results of every text."""

    def __init__(self, runner: Any, config: ModelConfig, ours: ProgramResults, plan: CheckPlan) -> None:
        assert config.pooler is not None
        self._runner, self._ours, self._prompts = runner, ours, plan.prompts
        self._is_causal = config.causal
        options = m.GenerationOptions(pooling=m.Pooling[config.pooler.pooling.upper()], max_tokens=1)
        self._options = options

    def all(self) -> None:
        most = self._runner.facts.max_num_prefill_tokens
        self._compute("whole", [[prompt] for prompt in self._prompts])
        self._compute("several in a step", self._packed(most))
        if self._is_causal:
            self._compute(f"in chunks of {CHUNK}", [[prompt] for prompt in self._prompts], CHUNK)

    def _packed(self, most: int) -> list[list[list[int]]]:
        """The texts in batches of at most `most` tokens, the shortest first."""
        batches: list[list[list[int]]] = [[]]
        for prompt in sorted(self._prompts, key=len):
            if sum(map(len, batches[-1])) + len(prompt) > most and batches[-1]:
                batches.append([])
            batches[-1].append(prompt)
        return batches

    def _compute(self, way: str, batches: Sequence[list[list[int]]], chunk: int | None = None) -> None:
        self._ours.texts[way] = [[] for _ in self._prompts]
        for batch in batches:
            for ids, result in zip(batch, self._results(batch, chunk), strict=True):
                self._ours.made.append(ComputedCase(way, tuple(ids), result))

    def _results(self, batch: list[list[int]], chunk: int | None) -> list[Any]:
        from pipeline.kernels.step_inputs import BLOCK_SIZE

        next_block, adds = 0, []
        for row, ids in enumerate(batch):
            num = math.ceil((len(ids) + 1) / BLOCK_SIZE)
            adds.append(row_add(row, ids, range(next_block, next_block + num), self._options))
            next_block += num
        results: list[Any] = [None] * len(batch)
        computed = [0] * len(batch)
        while any(done < len(ids) for done, ids in zip(computed, batch, strict=True)):
            entries: list[Entry] = []
            for row, ids in enumerate(batch):
                count = min(chunk or len(ids), len(ids) - computed[row])
                if count:
                    entries.append((row, computed[row], count, computed[row] + count == len(ids)))
                    computed[row] += count
            sampled = self._runner.step(step(entries, adds), take)
            adds = []
            numbers = sampled.token_outputs.view(np.float32)
            for row in sampled.rows.tolist():
                is_all = self._options.pooling == m.Pooling.ALL
                width = self._runner.facts.hidden_size * (len(batch[row]) if is_all else 1)
                results[row], numbers = numbers[:width].copy(), numbers[width:]
        self._runner.step(step(drops=range(len(batch))), take)
        return results
