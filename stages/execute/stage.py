"""The executor: loads the model on the configured device, then serves steps (stages/execute/loop.py)."""

import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline import torch_needed
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.model.kv_groups import described, has_windows
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process import heap
from pipeline.runtime.stage import Stage
from pipeline.stages.execute.cores import threads_of, use_cores

if TYPE_CHECKING:
    from pipeline.stages.execute.loop import MakeSteps
    from pipeline.stages.execute.ranks.context import RankContext
    from pipeline.stages.execute.runner import Runner

Serve = Callable[[Stage[m.ExecuteInbox]], None]

SPIN_COUNT = "1000"
"""GOMP_SPINCOUNT: spins of a thread before it sleeps at a barrier; a few microseconds."""


def run(launch: m.Launch) -> None:
    """Load the model, then compute steps until `Stop`.

    Raises UserError if the model can't run with these settings. Errors of a step propagate and end the stage.
    """
    _refuse_alone(launch)
    stage: Stage[m.ExecuteInbox] = open_stage(launch, m.ExecuteInbox)
    try:
        runner, serve = _load(
            launch, _own_swap(launch, stage.memory(topology.SWAP)), lambda now: stage.supervisor.send(m.Compiling(now))
        )
        quantization = launch.settings.quantization
        weights = quantization if quantization in ("int8", "int4") else runner.weight_formats  # made while loading
        fields: dict[str, object] = {
            "model": launch.model_dir,
            **_rank_fields(launch, runner),
            "weights": "+".join(sorted(weights.split("+"))),  # as in /v1/models
            "blocks": runner.facts.num_blocks,
            "kv_dtype": runner.facts.kv_dtype,
            "kernels": runner.name,
        }
        if has_windows(runner.facts.kv_groups):
            fields["kv_groups"] = described(runner.facts.kv_groups)
        if runner.facts.num_swap_blocks:
            fields["swap_blocks"] = runner.facts.num_swap_blocks
        if runner.facts.num_state_slots:
            fields["state_slots"] = runner.facts.num_state_slots
        stage.log.info("loaded", extra={"fields": fields})
        if not runner.facts.is_batch_invariant and stage.launch.rank == 0:
            stage.log.warning(
                "not batch-invariant: a request's ids may depend on the other requests of its steps, and a stream that "
                "continues after a crash or at another replica may get other ids from there on"
            )
        runner.preload_adapters([one.id for one in launch.adapters])
        stage.ready(_facts_of(runner, weights, launch))
        try:
            serve(stage)
        finally:
            runner.close()
    finally:
        stage.close()


def _facts_of(runner: "Runner", weights: str, launch: m.Launch) -> m.ExecuteFacts:
    """What the other stages must know. An executor that replaces another one has the same number of blocks, and
    computes with the same back end: else open streams would continue with other ids. Raises UserError if it can't."""
    execute, before = launch.settings.execute, launch.facts
    backend = m.Backend(
        *(runner.kernels, runner.code, execute.dtype, "+".join(sorted(weights.split("+")))),
        *(runner.activations, runner.facts.kv_dtype),
    )
    facts = msgspec.structs.replace(runner.facts, weight_formats=weights, backend=backend)
    if before is None:
        return facts
    if facts.num_blocks < before.num_blocks:
        raise UserError(
            f"there is memory for {facts.num_blocks} KV blocks only, {before.num_blocks} are needed to go on: set "
            "execute.kv_cache_bytes"
        )
    if facts.num_state_slots < before.num_state_slots:
        raise UserError(
            f"there is memory for {facts.num_state_slots} states only, {before.num_state_slots} are needed to go on: "
            "set execute.kv_cache_bytes"
        )
    if facts.kv_groups != before.kv_groups:
        raise UserError(
            f"the layers are in other KV groups than before ({described(before.kv_groups)}): start a new server"
        )
    if backend != before.backend and launch.replay is None:  # which computes with what is here, and compares
        raise UserError(
            f"it would compute with another back end ({backend}) than the executor before ({before.backend}), and open "
            "streams would continue with other numbers: start a new server"
        )
    return before


def _refuse_alone(launch: m.Launch) -> None:
    """Raise UserError if this is one of several ranks, and the others can't be there."""
    execute = launch.settings.execute
    if execute.num_ranks == 1:
        return
    key = "tensor_parallel" if execute.tensor_parallel > 1 else "pipeline_parallel"
    if launch.replay is not None:
        raise UserError(
            f"{launch.name} is one of {execute.num_ranks} ranks (execute.{key}): it can't be replayed alone"
        )
    if launch.ranks_fd < 0:
        raise UserError(f"execute.{key} is {getattr(execute, key)}: ranks need processes of their own")


def _rank_context(launch: m.Launch) -> "RankContext":
    """The place of this process among the ranks."""
    from pipeline.stages.execute.ranks.context import RankContext

    execute = launch.settings.execute
    stage, rank = divmod(launch.rank, execute.tensor_parallel)
    return RankContext(
        *(rank, execute.tensor_parallel, launch.ranks_fd, execute.barrier_timeout_s),
        *(stage, execute.pipeline_parallel, launch.stages_fd),
    )


def _rank_fields(launch: m.Launch, runner: "Runner") -> dict[str, object]:
    """Of the log line of one of several ranks."""
    if not runner.rank_name:
        return {}
    rank = f"{launch.rank} of {launch.settings.execute.num_ranks}"
    return {"rank": rank, "rank_name": runner.rank_name, "layers": runner.layers}


def _own_swap(launch: m.Launch, swap: memoryview | None) -> memoryview | None:
    """This rank's part of the swap space."""
    size = launch.settings.execute.swap_bytes
    return None if swap is None else swap[launch.rank * size : (launch.rank + 1) * size]


def preload(launch: m.Launch) -> None:
    """Import what `run` is going to need, except for CUDA's checks and kernels."""
    settings = launch.settings
    use_cores(settings, launch.rank)
    _set_num_threads(settings)
    if torch_needed.why_missing(settings) is not None:
        return  # `run` says it
    if settings.execute.device == "cuda":
        import_module("torch")
        return
    if settings.execute.kernels == "torch":
        import_module("pipeline.stages.execute.cpu.pytorch.program")
    import_module("pipeline.stages.execute.cpu.steps")
    import_module("pipeline.stages.execute.loop")


def _set_num_threads(settings: Settings) -> int:
    """Set what libraries read when they are loaded. Returns the number of threads that compute."""
    num_threads = threads_of(settings)
    os.environ.update(OMP_NUM_THREADS=str(num_threads), MKL_NUM_THREADS=str(num_threads), OPENBLAS_NUM_THREADS="1")
    # The other stages share these cores. A thread that spins at a barrier may occupy the core of the thread that it
    # waits for: with the library's default, a step can take fifty times as long beside a busy process.
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return num_threads


def _load(launch: m.Launch, swap: memoryview | None, compiling: Callable[[bool], object]) -> "tuple[Runner, Serve]":
    """The runner of the configured device, and the loop that serves with it."""
    settings = launch.settings
    num_threads = _set_num_threads(settings)
    if (problem := torch_needed.why_missing(settings)) is not None:
        raise UserError(problem)
    is_cuda = settings.execute.device == "cuda"
    load = partial(_load_cuda, num_threads) if is_cuda else partial(_load_cpu, compiling)
    runner, make_steps = load(launch, swap)
    from pipeline.stages.execute.loop import serve

    heap.freeze()
    return runner, partial(serve, runner=runner, make_steps=make_steps)


def _load_cuda(num_threads: int, launch: m.Launch, swap: memoryview | None) -> "tuple[Runner, MakeSteps]":
    import torch

    torch.set_num_threads(num_threads)
    from pipeline.stages.execute.cuda.available import require

    settings, model_dir = launch.settings, Path(launch.model_dir)
    require(settings, ModelConfig.load(launch.model_dir), model_dir, launch.rank)
    from pipeline.stages.execute.cuda.device import make_device
    from pipeline.stages.execute.cuda.ranks.device_ranks import join_by
    from pipeline.stages.execute.cuda.runner import CudaRunner
    from pipeline.stages.execute.cuda.steps import CudaSteps

    context = _rank_context(launch)
    try:
        runner = CudaRunner(
            *(settings, model_dir, swap),
            device=make_device(launch.rank),
            join=join_by(context) if context.num_ranks > 1 else None,
        )
        runner.capture_graphs()
    except torch.OutOfMemoryError as error:
        what = str(error).partition(". ")[0]
        raise UserError(
            f"the GPU has too little memory for the model and its steps ({what}): lower "
            "schedule.max_num_batched_tokens, schedule.max_num_seqs or execute.gpu_memory_utilization"
        ) from error
    return runner, partial(CudaSteps, runner=runner)


def _load_cpu(
    compiling: Callable[[bool], object], launch: m.Launch, swap: memoryview | None
) -> "tuple[Runner, MakeSteps]":
    from pipeline.stages.execute.cpu.kept_library import KeptLibrary
    from pipeline.stages.execute.cpu.runner import CpuRunner
    from pipeline.stages.execute.cpu.saved_kv import SavedKV, has_saved
    from pipeline.stages.execute.cpu.steps import CpuSteps

    before = launch.facts if launch.replay is None else None
    wakes = has_saved(launch.saved_kv_fd)
    kept = KeptLibrary(launch.library_fd, None if before is None else before.backend, wakes=wakes)
    runner = CpuRunner(
        launch.settings, Path(launch.model_dir), swap, _rank_context(launch), kept=kept, compiling=compiling
    )
    runner.saved_kv = saved = SavedKV(launch.saved_kv_fd, runner.program, runner.facts, runner.pool)
    if (num_bytes := saved.load()) and launch.replay is None:
        logging.getLogger("pipeline").info("loaded the saved KV cache", extra={"fields": {"bytes": num_bytes}})
    if runner.states is not None:
        runner.states.checks = launch.replay is None
    return runner, partial(CpuSteps, runner=runner)
