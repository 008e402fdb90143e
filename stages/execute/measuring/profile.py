"""What a step of the executor costs, measured: the same programs that the stage runs, without messages or rows."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeline.cli.profile.results import Profile, ProfilePlan
from pipeline.cli.profile.shapes import SHAPES
from pipeline.config.settings import Settings
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.stage import SPIN_COUNT


def profile(settings: Settings, plan: ProfilePlan, prepare: Callable[[], Path]) -> Profile:
    """Measure what `plan` names, in this process, with the kernels and threads that the stage would take.

    `prepare` returns the model's folder; it is called unless the plan names a shape. Raises UserError, in the user's
    words, where the model can't be run so.
    """
    num_threads = settings.execute.num_threads or len(os.sched_getaffinity(0))
    # Libraries read these when they are loaded, which prepare may do as well. They are what the stage sets.
    os.environ.update(OMP_NUM_THREADS=str(num_threads), MKL_NUM_THREADS=str(num_threads), OPENBLAS_NUM_THREADS="1")
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    folder = None if plan.shape else prepare()

    import torch

    torch.set_num_threads(num_threads)
    if settings.execute.device == "cuda":
        return _on_gpu(settings, plan, folder, num_threads)
    from pipeline.stages.execute.measuring.measure import measure
    from pipeline.stages.execute.measuring.random_weights import RandomWeights
    from pipeline.stages.execute.weights import Weights

    dtype: torch.dtype = getattr(torch, settings.execute.dtype)
    weights: Weights
    if folder is None:
        assert plan.shape is not None
        config = SHAPES[plan.shape]
        weights = RandomWeights(config, dtype, settings.quantization)
    else:
        config = ModelConfig.load(folder)
        weights = Weights(folder, config, dtype)
    return measure(settings, config, weights, plan, num_threads)


def _on_gpu(settings: Settings, plan: ProfilePlan, folder: Path | None, num_threads: int) -> Profile:
    import torch

    from pipeline.stages.execute.cuda.available import require
    from pipeline.stages.execute.measuring.random_weights import RandomWeights

    weights = None
    with tempfile.TemporaryDirectory(prefix="pipeline-profile-") as name:
        if folder is None:
            assert plan.shape is not None
            config, folder = SHAPES[plan.shape], Path(name)
            config.save(folder)
            weights = RandomWeights(config, getattr(torch, settings.execute.dtype), settings.quantization)
        require(settings, ModelConfig.load(folder), folder)
        # It imports triton, without which there is a better error.
        from pipeline.stages.execute.cuda.measuring.measure import measure

        return measure(settings, folder, plan, num_threads, weights)
