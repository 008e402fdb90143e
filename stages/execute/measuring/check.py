"""Computes a model in every way that a scheduler may use, for comparison: whole prompts, chunks, mixed batches, and
rows with a cached prefix. The steps are planned by hand."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.cli.check.cases import NUM_GREEDY, PREFIX, CheckPlan, ComputedCase, ProgramResults
from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.kv import kv_block_bytes, state_slot_bytes
from pipeline.stages.execute.measuring.planned import Entry, row_add, step, take
from pipeline.stages.execute.measuring.pooled_check import PooledComparison
from pipeline.stages.execute.stage import SPIN_COUNT

CHUNKS = (33, 7)
"""Tokens of a chunk: one more than a block, one less; neither divides a prompt's length."""

MAX_TOKENS = 2**31 - 1
"""Tokens of a step without a limit."""

BATCH_TOKENS = 48
"""Tokens of a step that mixes prefill and decode."""


def set_up(settings: Settings) -> None:
    """Set the libraries' thread counts, as a stage does. Call it before any of them is imported."""
    num_threads = str(settings.execute.num_threads or len(os.sched_getaffinity(0)))
    os.environ.update(OMP_NUM_THREADS=num_threads, MKL_NUM_THREADS=num_threads, OPENBLAS_NUM_THREADS="1")
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def compute(settings: Settings, folder: Path, plan: CheckPlan) -> Iterator[ProgramResults]:
    """Compute the plan by torch in float32, then in bfloat16 by the server's back end unless that is torch; on a GPU
    also in float32. Raises UserError if the model can't run with these settings."""
    import torch

    torch.set_num_threads(settings.execute.num_threads or len(os.sched_getaffinity(0)))
    yield _ours(_settings(settings, folder, plan, "float32", "torch", "cpu"), folder, plan)
    device, kernels = settings.execute.device, settings.execute.kernels
    if device == "cuda":
        yield _ours(_settings(settings, folder, plan, "float32", kernels, device), folder, plan)
    if kernels != "torch":
        yield _ours(_settings(settings, folder, plan, "bfloat16", kernels, device), folder, plan)


def _settings(settings: Settings, folder: Path, plan: CheckPlan, dtype: str, kernels: str, device: str) -> Settings:
    """Settings with just enough memory for the plan: every prompt and its text, twice for rows without a prefix."""
    from pipeline.kernels.step_inputs import BLOCK_SIZE

    config = ModelConfig.load(folder)
    lengths = [len(prompt) + NUM_GREEDY for prompt in plan.prompts]
    num_blocks = sum(math.ceil(length / BLOCK_SIZE) for length in lengths) + 2 * len(lengths)
    replace = msgspec.structs.replace
    # float32 is compared exactly, so its KV cache has float32 too.
    kv_dtype = "auto" if dtype == "float32" else settings.execute.kv_dtype
    execute = replace(
        settings.execute, device=device, dtype=dtype, kernels=kernels, kv_dtype=kv_dtype, hybrid_kv_cache_manager=False
    )
    return replace(
        settings,
        max_model_len=max(lengths),
        execute=replace(execute, kv_cache_bytes=_kv_bytes(execute, config, num_blocks, len(lengths))),
        schedule=replace(
            settings.schedule,
            max_num_seqs=len(lengths),
            max_num_batched_tokens=max(*lengths, BATCH_TOKENS),
        ),
    )


def _kv_bytes(execute: ExecuteSettings, config: ModelConfig, num_blocks: int, num_rows: int) -> int:
    """Memory for blocks, and for the state of each row and one of a prefix: half of it is for states."""
    num_bytes = num_blocks * kv_block_bytes(execute, config)
    slot_bytes = state_slot_bytes(config)
    return 2 * max(num_bytes, (num_rows + 1) * slot_bytes) if slot_bytes else num_bytes


def _ours(settings: Settings, folder: Path, plan: CheckPlan) -> ProgramResults:
    runner: Any
    if settings.execute.device == "cuda":
        from pipeline.stages.execute.cuda.available import require

        require(settings, ModelConfig.load(folder), folder)
        from pipeline.stages.execute.cuda.runner import CudaRunner

        runner = CudaRunner(settings, folder)
    else:
        from pipeline.stages.execute.cpu.runner import CpuRunner

        runner = CpuRunner(settings, folder)
        runner.program.keep_logits()
    try:
        # A GPU's float32 matmuls are as exact as a CPU's, but sum in another order.
        exact = settings.execute.dtype == "float32"
        config = ModelConfig.load(folder)
        ours = ProgramResults(
            f"{runner.name}, {settings.execute.dtype}", exact, chooses_experts=config.experts is not None
        )
        if config.generates:
            _PlanComparison(runner, ours, plan).all()
        else:
            PooledComparison(runner, config, ours, plan).all()
        return ours
    finally:
        runner.close()


class _PlanComparison:
    """Computes a plan in each way, keeping the logits of every sampled row."""

    def __init__(self, runner: Any, ours: ProgramResults, plan: CheckPlan) -> None:
        self._runner = runner
        self._ours = ours
        self._prompts = plan.prompts
        self._way = ""
        self._has_states = runner.facts.num_state_slots > 0
        self._slots: dict[int, int] = {}
        """By row: the slot with the state behind what is computed. Each row writes the slot with its own number."""

    def all(self) -> None:
        self._begin("whole")
        self._keep_texts([text for prompt in self._prompts for text in self._texts([prompt])])
        for chunk in CHUNKS:
            self._begin(f"in chunks of {chunk}")
            self._keep_texts([text for prompt in self._prompts for text in self._texts([prompt], chunk=chunk)])
        self._begin("all in one batch")
        self._keep_texts(self._texts(self._prompts, budget=BATCH_TOKENS))
        self._begin("behind a cached prefix")
        self._keep_texts(self._behind_prefix())

    def _begin(self, way: str) -> None:
        self._way = way

    def _keep_texts(self, texts: list[list[int]]) -> None:
        self._ours.texts[self._way] = texts

    def _behind_prefix(self) -> list[list[int]]:
        """One row computes the prefix, then all rows with this prefix share its blocks in one batch."""
        prefix = self._prompts[0][:PREFIX]
        sharing = [prompt[:PREFIX] == prefix and len(prompt) > PREFIX for prompt in self._prompts]
        return self._texts(self._prompts, budget=BATCH_TOKENS, shared=[PREFIX if shares else 0 for shares in sharing])

    def _texts(
        self,
        prompts: Sequence[list[int]],
        *,
        chunk: int | None = None,
        budget: int = MAX_TOKENS,
        shared: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Greedy texts of prompts in one batch, from empty memory. `chunk` limits the tokens of a row in a step,
        `budget` those of a step. The first `shared[i]` ids of row i are in blocks that an earlier step computes."""
        from pipeline.kernels.step_inputs import BLOCK_SIZE

        computed = list(shared or [0] * len(prompts))
        common = list(range(max(computed) // BLOCK_SIZE))
        next_block = len(common)
        self._slots = {}
        if common:
            add = row_add(0, prompts[0][: max(computed)], common)
            self._step([add], [(0, 0, max(computed), False)], writes=[len(prompts)])
            self._drop([0])
            self._slots = {row: len(prompts) for row, start in enumerate(computed) if start}
        adds = []
        for row, prompt in enumerate(prompts):
            own = math.ceil((len(prompt) + NUM_GREEDY) / BLOCK_SIZE) - computed[row] // BLOCK_SIZE
            adds.append(
                row_add(row, prompt, [*common[: computed[row] // BLOCK_SIZE], *range(next_block, next_block + own)])
            )
            next_block += own
        known = [list(prompt) for prompt in prompts]
        while any(len(ids) < len(prompt) + NUM_GREEDY for ids, prompt in zip(known, prompts, strict=True)):
            left = budget
            entries: list[Entry] = []
            for row, ids in enumerate(known):
                count = min(len(ids) - computed[row], chunk or left, left)
                if count and len(ids) < len(prompts[row]) + NUM_GREEDY:
                    entries.append((row, computed[row], count, computed[row] + count == len(ids)))
                    computed[row] += count
                    left -= count
            for row, token, logits in self._step(adds, entries):
                self._ours.made.append(ComputedCase(self._way, tuple(known[row]), logits))
                known[row].append(token)
            adds = []
        self._drop(list(range(len(prompts))))
        return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]

    def _step(
        self, adds: list[m.RowAdd], entries: Sequence[Entry], writes: Sequence[int] | None = None
    ) -> list[tuple[int, int, Any]]:
        """Compute entries. Returns row, id and logits of the sampled ones. `writes` are slots for their states, if not
        those of their rows."""
        rows = [row for row, *_ in entries]
        reads = [self._slots.get(row, -1) for row in rows]
        states = list(zip(reads, writes or rows, strict=True)) if self._has_states else []
        self._slots.update(zip(rows, writes or rows, strict=True))
        sampled = self._runner.step(step(entries, adds, states=states), take)
        logits = self._runner.logits().copy() if len(sampled.rows) else []
        return list(zip(sampled.rows.tolist(), sampled.ids.tolist(), logits[: len(sampled.rows)], strict=True))

    def _drop(self, rows: list[int]) -> None:
        self._runner.step(step(drops=rows), take)
