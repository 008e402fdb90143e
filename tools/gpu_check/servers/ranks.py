"""Tensor parallelism over two GPUs: outputs against those of one GPU, and times of decode steps.

Each rank is a process of its own, as in a server. With fewer than two GPUs, a line says that nothing was checked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring import planned as steps
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.models import WeightsOnDevice, write_prepared
from tools.gpu_check.readings import Reading, check
from tools.gpu_check.runners import settings_for
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B, SMALL, TINY

NUM_RANKS = 2
ALL_REDUCES = ("nccl", "one_shot")
LARGEST_ERROR = 2e-2
"""Of a logit, as a share of their standard deviation, in float32: tensor cores are off there, but sums have another
order."""
PROMPT = 100
BATCHES = (1, 8, 32)
NUM_STEPS = 50
LIMIT_S = 100.0


def items(context: Context) -> list[Item]:
    num = NUM_RANKS if context.interpreted else torch.cuda.device_count()
    if num < NUM_RANKS:
        return [Item("two GPUs", partial(_too_few, num=num), 1, 10)]
    made = [Item(f"outputs, {how}", partial(_outputs, all_reduce=how), 20, LIMIT_S) for how in ALL_REDUCES]
    if not context.interpreted:
        for config in (LLAMA_1B, LLAMA_8B):
            made += [Item(f"{config.name}, {how}", partial(_times, config=config, all_reduce=how), 30, LIMIT_S)
                     for how in ALL_REDUCES]  # fmt: skip
    return made


def _too_few(context: Context, num: int) -> Iterator[Reading]:
    yield Reading("tensor parallelism", result="cut", note=f"not checked: it needs {NUM_RANKS} GPUs, and {num} is here")


def _outputs(context: Context, all_reduce: str) -> Iterator[Reading]:
    config = TINY if context.interpreted else SMALL
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        write_prepared(folder / "model", config, seed=11)
        one = _run(folder, config, 1, "nccl", "float32", context)[0]
        two = _run(folder, config, NUM_RANKS, all_reduce, "float32", context)
        for found in two[1:]:
            assert found["ids"] == two[0]["ids"], "ranks have different ids"
        expected, logits = (np.array(found["logits"], np.float32) for found in (one, two[0]))
        error = float(np.abs(logits - expected).max() / expected.std())
        yield check(f"{NUM_RANKS} ranks, {all_reduce}: logits against one GPU", error, LARGEST_ERROR)
        same = sum(a == b for a, b in zip(one["ids"], two[0]["ids"], strict=True))
        note = f"{same} of {len(one['ids'])} greedy ids are those of one GPU"
        yield Reading(f"{NUM_RANKS} ranks, {all_reduce}: ids", result="pass" if same else "FAIL", note=note)


def _times(context: Context, config: ModelConfig, all_reduce: str) -> Iterator[Reading]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        config.save(folder / "model")
        found = _run(folder, config, NUM_RANKS, all_reduce, "bfloat16", context)[0]
        for batch, ms in found["ms"].items():
            case = f"{config.name}, {NUM_RANKS} ranks, {all_reduce}: a step of {batch} rows"
            yield Reading(case, ms, "ms", less_is_better=True)


def _run(
    folder: Path, config: ModelConfig, num_ranks: int, all_reduce: str, dtype: str, context: Context
) -> list[dict[str, Any]]:
    """What each rank has found. Raises RuntimeError if one of them fails or takes too long."""
    fd = os.memfd_create("ranks")
    outs = [folder / f"{num_ranks}-{all_reduce}-{rank}.json" for rank in range(num_ranks)]
    processes = []
    try:
        for rank, out in enumerate(outs):
            task = {"rank": rank, "num": num_ranks, "fd": fd, "model": str(folder / "model"), "out": str(out)}
            task |= {"all_reduce": all_reduce, "dtype": dtype, "is_timed": dtype == "bfloat16"}
            command = [sys.executable, "-m", "tools.gpu_check.servers.ranks", json.dumps(task)]
            processes.append(subprocess.Popen(command, pass_fds=(fd,)))
        end_s = time.monotonic() + min(LIMIT_S, context.wait_s)
        for rank, process in enumerate(processes):
            if code := process.wait(max(0.1, end_s - time.monotonic())):
                raise RuntimeError(f"rank {rank} ended with exit code {code}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(fd)
    return [json.loads(out.read_text()) for out in outs]


def _rank(task: dict[str, Any]) -> None:
    """Runs in a process of its own."""
    from pipeline.stages.execute.cuda.device import make_device
    from pipeline.stages.execute.cuda.ranks.device_ranks import join_by
    from pipeline.stages.execute.cuda.runner import CudaRunner
    from pipeline.stages.execute.ranks.context import RankContext

    folder, is_timed = Path(task["model"]), task["is_timed"]
    config = ModelConfig.load(folder)
    most = max(BATCHES) if is_timed else 2
    length = PROMPT + NUM_STEPS + 16 if is_timed else 48
    element: torch.dtype = getattr(torch, task["dtype"])
    kv = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, element.itemsize)
    settings = settings_for(
        "cuda",
        dtype=task["dtype"],
        max_model_len=length,
        kv_cache_bytes=max(kv * (steps.num_blocks(length) + 1) * most, 1024**2),
        max_num_seqs=most,
        max_num_batched_tokens=max(PROMPT, most) if is_timed else 16,
    )
    execute = msgspec.structs.replace(
        settings.execute, tensor_parallel=task["num"], all_reduce=task["all_reduce"], hybrid_kv_cache_manager=False
    )
    settings = msgspec.structs.replace(settings, execute=execute)
    join = None if task["num"] == 1 else join_by(RankContext(task["rank"], task["num"], task["fd"], 60.0))
    device = make_device(task["rank"])
    weights = WeightsOnDevice(config, element) if is_timed else None
    runner = CudaRunner(settings, folder, device=device, weights=weights, join=join)
    runner.capture_graphs()
    found: dict[str, Any] = {"ms": {str(num): _time(runner, config, num) for num in BATCHES}} if is_timed else {}
    if not is_timed:
        prompt = [5, 9, 2, 31, 7, 8, 40]
        adds = [steps.row_add(0, prompt, list(range(steps.num_blocks(length))))]
        ids = runner.step(steps.step([(0, 0, len(prompt), True)], adds), steps.take).ids.tolist()
        for i in range(4):
            ids += runner.step(steps.step([(0, len(prompt) + i, 1, True)]), steps.take).ids.tolist()
        found = {"ids": ids, "logits": runner.logits()[:1].tolist()}
    runner.close()
    Path(task["out"]).write_text(json.dumps(found))


def _time(runner: Any, config: ModelConfig, num: int) -> float:
    """Milliseconds of a decode step of `num` rows."""
    blocks = steps.num_blocks(PROMPT + NUM_STEPS + 16)
    rng = np.random.default_rng(1)
    for row in range(num):
        prompt = rng.integers(3, config.vocab_size, PROMPT).tolist()
        adds = [steps.row_add(row, prompt, list(range(row * blocks, (row + 1) * blocks)))]
        runner.step(steps.step([(row, 0, PROMPT, True)], adds), steps.take)
    began_s = 0.0
    for i in range(NUM_STEPS + 8):
        if i == 8:
            runner.drain()
            began_s = time.perf_counter()
        runner.launch(steps.step([(row, PROMPT + i, 1, True) for row in range(num)]), steps.take)
    runner.drain()
    took_s = time.perf_counter() - began_s
    runner.step(steps.step(drops=range(num)), steps.take)
    return 1000 * took_s / NUM_STEPS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One rank; started by the section.")
    parser.add_argument("task")
    _rank(json.loads(parser.parse_args().task))
    gpu.synchronize()
