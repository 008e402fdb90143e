"""The executor's loop.

Each message is handled in the order it came; a step's result is sent the moment it is complete, before anything else
is looked at. Shared memory that steps came in is released once per wake, with the results: the scheduler is then awake
anyway, and no core is taken from the step that runs.
"""

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from pipeline import messages as m
from pipeline import topology
from pipeline.model_folder import ModelConfig
from pipeline.stage import Stage
from pipeline.stages.execute.counting import Counting
from pipeline.tracing import Args

if TYPE_CHECKING:
    from pipeline.stages.execute.runner import Runner

IDLE_S = 1.0
"""Longest wait for a message before the loop turns."""

SPIN_COUNT = "1000"
"""How often a thread looks for its fellows before it sleeps: some microseconds."""


def run(launch: m.Launch) -> None:
    """Load the model, then compute steps until `Stop`.

    Raises UserError, in the user's words, where the model can't be run with these settings; any error of a step
    propagates, for a broken step ends the stage.
    """
    stage: Stage[m.ExecuteInbox] = Stage(launch, m.ExecuteInbox)
    try:
        runner = _load(launch, stage.memory(topology.SWAP))
        fields: dict[str, object] = {
            "model": launch.model_dir,
            "weights": runner.weight_formats,
            "blocks": runner.facts.num_blocks,
            "kernels": runner.program.name,
        }
        if runner.facts.num_swap_blocks:
            fields["swap_blocks"] = runner.facts.num_swap_blocks
        stage.log.info("loaded", extra={"fields": fields})
        stage.ready(runner.facts)
        try:
            _serve(stage, runner)
        finally:
            runner.close()
    finally:
        stage.close()


def _load(launch: m.Launch, swap: memoryview | None) -> "Runner":
    # Libraries read these when they are loaded, so torch is imported below and not above.
    num_threads = launch.settings.execute.threads or len(os.sched_getaffinity(0))
    os.environ.update(OMP_NUM_THREADS=str(num_threads), MKL_NUM_THREADS=str(num_threads), OPENBLAS_NUM_THREADS="1")
    # The other stages share these cores. A thread that spins until its fellows arrive keeps the core from just the
    # fellow that it waits for: with the library's own count a step can take fifty times as long beside a busy process.
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    import torch

    from pipeline.stages.execute.runner import Runner

    torch.set_num_threads(num_threads)
    if launch.settings.execute.device == "cuda":
        from pipeline.stages.execute.cuda.available import require

        require(launch.settings, ModelConfig.load(launch.model_dir), Path(launch.model_dir))
    runner = Runner(launch.settings, Path(launch.model_dir), swap)
    # Beside all that is still to be done, so that the first that needs a mask does not wait for a process to start.
    runner.masks.start()
    gc.collect()
    gc.freeze()
    return runner


def _serve(stage: Stage[m.ExecuteInbox], runner: "Runner") -> None:
    idle_since = stage.tape.monotonic()
    counting = Counting()
    stage.asides.own_counts = lambda: counting.counts(runner.rows.num_live)
    while True:
        for message in stage.inbox.wait_all(IDLE_S):
            match message:
                case m.Step():
                    idle_since = _publish(stage, runner, message, idle_since, counting)
                case m.Release():
                    stage.arrays.released(message)
                case m.Ping():
                    stage.supervisor.send(m.Pong(message.nonce, m.PlainLoad(runner.rows.num_live)))
                case m.Start():
                    pass
                case m.Stop():
                    return
                case _:
                    assert_never(message)
        stage.release()


def _publish(
    stage: Stage[m.ExecuteInbox], runner: "Runner", step: m.Step, idle_since: float, counting: Counting
) -> float:
    """Compute a step and send its result. Returns when it was computed, by the stage's clock."""
    began = stage.tape.monotonic()
    sampled = runner.step(step, stage.arrays.take, stage.tape.monotonic)
    ended = stage.tape.monotonic()
    result = m.StepResult(
        incarnation=step.incarnation,
        step_id=step.step_id,
        rows=stage.arrays.put(sampled.rows),
        generations=stage.arrays.put(sampled.generations),
        ids=stage.arrays.put(sampled.ids),
        finishes=stage.arrays.put(sampled.finishes),
        compute_s=ended - began,
        wait_s=began - idle_since,
        copy_s=sampled.copy_s,
        records=stage.arrays.put(sampled.records),
        prompt_records=stage.arrays.put(sampled.prompt_records),
        errors=list(sampled.errors),
    )
    sent = stage.outbox("schedule").send(result)
    assert sent, "the scheduler takes no results: more steps are in flight than its inbox holds"
    counting.stepped(sampled.num_tokens, ended - began, began - idle_since)
    if stage.trace.on:
        args: Args = {
            "step": step.step_id,
            "rows": sampled.num_rows,
            "tokens": sampled.num_tokens,
            "sampled": len(sampled.rows),
            "wait_ms": round((began - idle_since) * 1000, 3),
        }
        if sampled.num_copies:
            args |= {"copies": sampled.num_copies, "copy_ms": round(sampled.copy_s * 1000, 3)}
        stage.trace.span("step", began, ended, args, [add.request_id for add in step.adds])
    return ended
