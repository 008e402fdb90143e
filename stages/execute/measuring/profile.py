"""Measures the executor's steps: the programs that the stage runs, without messages and rows."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeline.cli.profile.results import Profile, ProfilePlan
from pipeline.cli.profile.shape import with_layers
from pipeline.cli.profile.shapes import SHAPES
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.stage import SPIN_COUNT


def profile(settings: Settings, plan: ProfilePlan, prepare: Callable[[], Path]) -> Profile:
    """Measure a plan in this process, with the kernels and threads that the stage would use.

    `prepare` returns the model's folder; it is called unless the plan names a shape. Raises UserError if the model
    can't run with these settings.
    """
    for key in ("tensor_parallel", "pipeline_parallel"):
        if (num := getattr(settings.execute, key)) > 1:
            raise UserError(
                f"execute.{key} is {num}: pipeline profile execute measures one process, so leave it at 1 here"
            )
    num_threads = settings.execute.num_threads or len(os.sched_getaffinity(0))
    # The stage sets the same. Libraries read these when they are loaded, and `prepare` may load them.
    os.environ.update(OMP_NUM_THREADS=str(num_threads), MKL_NUM_THREADS=str(num_threads), OPENBLAS_NUM_THREADS="1")
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    folder = None if plan.shape else prepare()
    if settings.execute.device == "cuda":
        return _on_gpu(settings, plan, folder, num_threads)
    from pipeline.stages.execute.cpu.measuring.measure import measure
    from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights

    weights: Weights
    if folder is None:
        import torch

        from pipeline.stages.execute.measuring.random_weights import RandomWeights

        torch.set_num_threads(num_threads)
        config = _shape(plan)
        weights = RandomWeights(config, getattr(torch, settings.execute.dtype), settings.quantization)
    else:
        config = ModelConfig.load(folder)
        weights = Weights(folder, config, FLOAT_FORMATS[settings.execute.dtype])
    return measure(settings, config, weights, plan, num_threads)


def _shape(plan: ProfilePlan) -> ModelConfig:
    assert plan.shape is not None
    config = SHAPES[plan.shape]
    return config if plan.layers is None else with_layers(config, plan.layers)


def _on_gpu(settings: Settings, plan: ProfilePlan, folder: Path | None, num_threads: int) -> Profile:
    import torch

    torch.set_num_threads(num_threads)
    from pipeline.stages.execute.cuda.available import require
    from pipeline.stages.execute.measuring.random_weights import RandomWeights

    weights = None
    with tempfile.TemporaryDirectory(prefix="pipeline-profile-") as name:
        if folder is None:
            config, folder = _shape(plan), Path(name)
            config.save(folder)
            weights = RandomWeights(config, getattr(torch, settings.execute.dtype), settings.quantization)
        require(settings, ModelConfig.load(folder), folder)
        # Imported here, after the check for triton, whose error is better.
        from pipeline.stages.execute.cuda.measuring.measure import measure

        return measure(settings, folder, plan, num_threads, weights)
