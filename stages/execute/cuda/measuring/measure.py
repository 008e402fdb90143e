"""Measures steps on a GPU: the stage's own launches, from synthetic messages, timed by the GPU's clock.

The cases of a plan take turns in rounds, as on a CPU. A turn of a decode case is several steps, whose context is random
keys and values. Steps are launched while the previous one runs, as in a server.
"""

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import torch

from pipeline.cli.profile.results import Case, Profile, ProfilePlan
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.device import make_device
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.measuring.costs import GpuSamples, costs_of, summarize, weight_bytes
from pipeline.stages.execute.cuda.measuring.launches import Launches, traced
from pipeline.stages.execute.cuda.measuring.rates import Probe
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.execute.kv import kv_dtype
from pipeline.stages.execute.measuring.cases import check_positions, cpu_name, num_blocks_of
from pipeline.stages.execute.measuring.planned import row_add, step, take
from pipeline.stages.execute.weights import Weights
from pipeline.version import VERSION

DECODE_STEPS = 8
"""Steps of a turn; the last one has the case's context."""
IN_FLIGHT = 2


def measure(
    settings: Settings, folder: Path, plan: ProfilePlan, num_threads: int, weights: Weights | None = None
) -> Profile:
    """Measure the steps of a plan. `weights` replace those of the folder. Raises UserError if the model can't run with
    these settings, or if the plan does not fit it."""
    log = logging.getLogger("pipeline")
    if plan.verifies:
        raise UserError("--verify needs execute.device = 'cpu'")
    config, cases = ModelConfig.load(folder), plan.cases()
    check_positions(cases, config, config.max_position - 1)  # one more id is sampled
    dtype: torch.dtype = getattr(torch, settings.execute.dtype)
    with ExitStack() as stack:
        device = stack.enter_context(closing(make_device()))
        if not device.captures_graphs:
            log.warning("kernels run in Triton's interpreter on the CPU: their times mean nothing for a GPU")
        probe = Probe(device)
        log.info("loading %s for %s", config.name, device.name)
        runner = stack.enter_context(closing(CudaRunner(_room(settings, config, cases), folder, None, device, weights)))
        turns = InterleavedCases(runner, config, cases)
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        log.info("measuring %s", device.name)
        before = probe.measure()
        samples = _run_rounds(turns, cases, range(0 if device.captures_graphs else 1, plan.rounds + 1), log)
        after = probe.measure()
        # Last, because profiling slows everything after it.
        log.info("profiling kernels")
        for i, case in enumerate(cases):
            samples[i].launched = turns.traced(case)
        rates = before.best(after)
        return Profile(
            version=VERSION,
            model=config.name,
            weight_bytes=weight_bytes(runner.model),
            kv_dtype=kv_dtype(settings.execute),
            kernels="triton",
            cpu=cpu_name(),
            num_threads=num_threads,
            plan=plan,
            before=before,
            after=after,
            steps=[
                summarize(case, samples[i], costs_of(case, config, runner.model, runner.kv.dtype), rates, dtype)
                for i, case in enumerate(cases)
            ],
            gpu=device.name,
        )


def _room(settings: Settings, config: ModelConfig, cases: Sequence[Case]) -> Settings:
    """The server's settings, with limits raised to fit the cases. Padding depends on these limits."""
    schedule = settings.schedule
    schedule = msgspec.structs.replace(
        schedule,
        max_num_seqs=max(schedule.max_num_seqs, *(case.num_seqs for case in cases)),
        max_num_batched_tokens=max(schedule.max_num_batched_tokens, *(case.num_tokens for case in cases)),
    )
    execute = msgspec.structs.replace(settings.execute, hybrid_kv_cache_manager=False)
    longest = max(config.longest_sequence(settings.max_model_len), *(case.context + 1 for case in cases))
    return msgspec.structs.replace(settings, schedule=schedule, execute=execute, max_model_len=longest)


# -------------------------------------------------------------------------------------------------------- measuring


class InterleavedCases:
    """Computes the steps of cases."""

    def __init__(self, runner: CudaRunner, config: ModelConfig, cases: Sequence[Case]) -> None:
        """Raises UserError if the KV memory is too small for the cases."""
        self._runner = runner
        num_blocks, wanted = runner.facts.num_blocks, max(num_blocks_of(case) for case in cases)
        if wanted > num_blocks:
            raise UserError(
                f"these steps need {wanted} KV blocks, but only {num_blocks} fit in memory: lower --batch, --context "
                "or --prefill, or raise execute.kv_cache_bytes"
            )
        check_positions(cases, config, runner.facts.max_model_len - 1)
        random = np.random.default_rng(0)
        # A sequence's blocks are scattered, as in a server that has run for a while.
        self._blocks = random.permutation(num_blocks)[:wanted]
        self._ids = random.integers(0, config.vocab_size, max(case.context for case in cases))
        where = torch.from_numpy(self._blocks).to(runner.kv.device)
        for layer in runner.kv:  # zeros would draw less power than random numbers
            layer[:, where] = torch.rand_like(layer[:, where]) - 0.5

    def counted(self, case: Case) -> list[LaunchedStep]:
        """The steps of a turn that count: all but the first, which adds the rows, unless it is the only one."""
        launched_steps = self._compute(case)
        self._drop(case)
        return launched_steps[1:] or launched_steps

    def traced(self, case: Case) -> list[Launches]:
        """The launches of a step."""
        launched = traced(lambda: self._compute(case), _num_steps(case))
        self._drop(case)
        return launched

    def _compute(self, case: Case) -> list[LaunchedStep]:
        """Run a turn and wait for it."""
        runner, launched_steps = self._runner, []
        num_steps = _num_steps(case)
        start = case.context - case.num_new - (num_steps - 1)
        rows = range(case.num_seqs)
        tables = self._blocks[: num_blocks_of(case)].reshape(case.num_seqs, -1).tolist()
        known = self._ids[: start + case.num_new].tolist()
        adds = [row_add(row, known, tables[row]) for row in rows]
        for i in range(num_steps):
            while len(runner.launched_steps) >= IN_FLIGHT:
                runner.collect()
            entries = [(row, start + i, case.num_new, True) for row in rows]
            launched_steps.append(runner.launch(step(entries, adds if i == 0 else ()), take))
        runner.drain()
        return launched_steps

    def _drop(self, case: Case) -> None:
        self._runner.step(step(drops=range(case.num_seqs)), take)


def _num_steps(case: Case) -> int:
    """Steps of a turn."""
    return 1 if case.phase == "prefill" else min(1 + DECODE_STEPS, case.context)


def _run_rounds(turns: InterleavedCases, cases: Sequence[Case], rounds: range, log: logging.Logger) -> list[GpuSamples]:
    """Each case's samples. Every round runs all cases. Round 0, which compiles kernels and captures graphs, is not
    counted."""
    samples = [GpuSamples() for _ in cases]
    for number in rounds:
        begun_s = time.perf_counter()
        for i, case in enumerate(cases):
            launched_steps = turns.counted(case)
            if number:
                samples[i].steps_ms += [_ms(launched_step) for launched_step in launched_steps]
                samples[i].launches_ms += [launched_step.launch_s * 1e3 for launched_step in launched_steps]
        what = f"round {number} of {rounds[-1]}" if number else "warmed up"
        log.info("%s took_s=%.1f", what, time.perf_counter() - begun_s)
    return samples


def _ms(launched_step: LaunchedStep) -> float:
    """Milliseconds of a collected step, by the GPU's clock; of its launch, if kernels are interpreted."""
    return (
        (launched_step.end_ns - launched_step.start_ns) / 1e6 if launched_step.end_ns else launched_step.launch_s * 1e3
    )
