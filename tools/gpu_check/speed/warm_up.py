"""Compiles what `speed` and `http` launch, by running every measured model once with two layers.

It runs beside the checks, so that no measured section spends time on compilation. Graph capture is then as fast as on a
machine whose kernel cache is warm.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from tools.gpu_check.child import Context, Item
from tools.gpu_check.machine.rates import COPY, MATMUL, READ
from tools.gpu_check.models import WeightsOnDevice
from tools.gpu_check.readings import Reading
from tools.gpu_check.runners import close, make_runner, settings_for
from tools.gpu_check.servers.http import MAX_BATCHED_TOKENS, MAX_MODEL_LEN, STREAMS
from tools.gpu_check.shapes import SMOLLM2_135M, TINY
from tools.gpu_check.speed.steps import MODELS, Model, measure


def items(context: Context) -> list[Item]:
    made = [Item(f"kernels of {model.name}", partial(_start, model=model), 1, 130) for model in MODELS]
    return [*made, Item("kernels of the server", _serve, 1, 130)]


def _start(context: Context, model: Model) -> Iterator[Reading]:
    # Rates measured beside other processes would be wrong, and measuring takes gigabytes.
    context.task.rates.update({COPY: 1.0, READ: 1.0, MATMUL: 1.0})
    began_s = time.perf_counter()
    for _ in measure(context, model, is_warm_up=True):
        pass
    took_s = time.perf_counter() - began_s
    note = "compiles all kernels of its steps, beside other processes"
    yield Reading(f"first start of {model.name}, two layers", took_s, "s", less_is_better=True, note=note)


def _serve(context: Context) -> Iterator[Reading]:
    """Compile everything that a server of the 135M shape may launch, with the limits of the `http` section."""
    began_s = time.perf_counter()
    config = msgspec.structs.replace(SMOLLM2_135M if not context.interpreted else TINY, num_layers=2)
    settings = settings_for(
        "cuda",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=256 * 1024**2,
        max_num_seqs=STREAMS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
    )
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        config.save(Path(name))
        runner = make_runner(settings, Path(name), WeightsOnDevice(config, torch.bfloat16))
        try:
            runner.capture_graphs()
            while context.left_s > 3 and runner.capture_more():
                pass
            num = runner.step_graphs.num_captured
        finally:
            close(runner)
    took_s = time.perf_counter() - began_s
    yield Reading("all graphs of a server, two layers", took_s, "s", less_is_better=True, note=f"{num} graphs")
