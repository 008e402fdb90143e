"""Measure the host's cost of a decode step on a GPU, without the GPU: graphs do nothing, and copies stay in memory.

    TRITON_INTERPRET=1 python -m tests.stages.execute.cuda.host_cost

Medians of 300 steps, without the time of CUDA's own calls (a graph's launch, two copies, an event). Rows with grammars
get their masks at once: it is the executor's part that is measured, not the mask process.
"""

import gc
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime import messages as m
from pipeline.stages.execute.cuda.device import Calls, Interpreted
from pipeline.stages.execute.cuda.runner import CudaRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import make_step, row_add, take
from tools.gpu_check.servers.in_flight import FakeMasks

NUM_STEPS = 300
PROMPT = [5] * 8
BLOCKS_PER_ROW = -(-(len(PROMPT) + NUM_STEPS) // BLOCK_SIZE) + 1
MODEL = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "max_position": 2048}


class Idle(Interpreted):
    """A device whose graphs do nothing."""

    def graph(self, calls: Calls) -> Calls:
        return lambda: None


class ReadyMasks(FakeMasks):
    """Allows everything."""

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> Any:
        self.words[: len(rows)] = 0xFFFF_FFFF
        return np.arange(len(rows))


def main() -> None:
    execute = ExecuteSettings(device="cuda", dtype="float32", kv_cache_bytes=256 * 1024**2, num_threads=1)
    settings = Settings(execute=execute, schedule=ScheduleSettings(max_num_seqs=256, max_num_batched_tokens=512))
    with tempfile.TemporaryDirectory() as name:
        checkpoints.write(Path(name), checkpoints.config_of(**MODEL))
        for num_rows, has_grammars in ((1, False), (32, False), (256, False), (1, True), (32, True)):
            runner: Any = CudaRunner(settings, Path(name), device=Idle())
            masks: Any = ReadyMasks(runner.masks.words)
            runner.masks.close()
            runner.masks = runner._changes._masks = masks
            options = m.GenerationOptions(compiled_grammar="of FakeMasks" if has_grammars else "", ignore_eos=True)
            adds = [row_add(row, PROMPT, [row * BLOCKS_PER_ROW], options) for row in range(num_rows)]
            runner.step(make_step(adds=adds), take)
            steps = [_step(num_rows, len(PROMPT) - 1 + i) for i in range(NUM_STEPS)]
            gc.collect()
            gc.freeze()
            launch_s, collect_s = [], []
            for step in steps:
                began_s = time.perf_counter()
                runner.launch(step, take)
                launched_s = time.perf_counter()
                runner.collect()
                launch_s.append(launched_s - began_s)
                collect_s.append(time.perf_counter() - launched_s)
            what = f"{num_rows} rows{' with grammars' * has_grammars}"
            print(f"{what}: launch {median(launch_s) * 1e6:.0f} µs, collect {median(collect_s) * 1e6:.0f} µs")
            runner.close()


def _step(num_rows: int, position: int) -> m.Step:
    rows = np.arange(num_rows)
    # All rows have the same length, so all of them get a block in one step of sixteen.
    block_index, is_first = position // BLOCK_SIZE, position % BLOCK_SIZE == 0
    blocks = [(row, row * BLOCKS_PER_ROW + block_index) for row in rows.tolist()] if is_first and block_index else []
    return make_step([(row, position, 1, True) for row in rows.tolist()], blocks=blocks, step_id=position)


if __name__ == "__main__":
    main()
