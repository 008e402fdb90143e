"""The hand-made scheduler for a GPU runner whose kernels are interpreted."""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.settings import Settings
from pipeline.stages.execute.cuda.runner import CudaRunner
from tests.stages.execute.driver import Driver


class CudaDriver(Driver):
    runner: Any

    def __init__(self, model_dir: str | Path, config: Settings, swap_bytes: int = 0) -> None:
        self.runner = CudaRunner(config, Path(model_dir), memoryview(bytearray(swap_bytes)) if swap_bytes else None)
        self._budget = config.schedule.max_num_batched_tokens
        self.clear()

    def logits(self) -> np.ndarray:
        return self.runner.model.logits.numpy().copy()
