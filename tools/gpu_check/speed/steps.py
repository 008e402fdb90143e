"""Times the executor's steps with plans made in advance: no scheduler, no sockets.

Weights are random. Each figure is shown beside the limit from the memory bandwidth measured in the same run: the time
to read the step's weights, keys and values.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.config.settings import Quantization
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring import planned as steps
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.machine import rates
from tools.gpu_check.models import WeightsOnDevice
from tools.gpu_check.readings import Reading
from tools.gpu_check.runners import close, make_runner, settings_for
from tools.gpu_check.shapes import (
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2_135M,
    TINY,
    bits_in_groups,
    num_layer_weights,
    step_bytes,
)

H200 = 1.43
"""Ratio of an H200's bandwidth to an H100's. The targets are for an H100."""
WARM_STEPS = 12
"""Steps of each case that are not measured."""
BATCH_TOKENS = 2048
"""Token budget of a prefill step."""
WARM_CONTEXT = 64
"""Context length of the warm-up."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target for one batch size, on an H100."""

    batch: int
    must: float | None = None
    goal: float | None = None
    in_ms: bool = False
    """Unit: milliseconds per token, instead of tokens per second."""
    scales: bool = True
    """Whether the target is scaled by the GPU's bandwidth."""


@dataclass(frozen=True, slots=True)
class Model:
    """The measurements of one model."""

    name: str
    config: ModelConfig
    context: int
    """Tokens of each sequence when decoding starts."""
    targets: tuple[Target, ...]
    quantization: Quantization = "none"
    early_launch: bool = True
    depths: tuple[int, ...] = (2,)
    needs_s: float = 15.0
    limit_s: float = 80.0

    @property
    def max_batch(self) -> int:
        return max(target.batch for target in self.targets)


MODELS = (
    Model(
        "135M",
        SMOLLM2_135M,
        512,
        (Target(1, 2000, 3000, scales=False), Target(256, 60e3, 120e3)),
        depths=(2, 4),
        needs_s=10,
    ),
    Model(
        "8B",
        LLAMA_8B,
        1024,
        (Target(1, 6.3, 5.7, in_ms=True), Target(32, 3500, 4000), Target(128, 8000, 9300)),
        needs_s=20,
    ),
    Model("8B int4", LLAMA_8B, 1024, (Target(1, 260, 400),), quantization="int4", needs_s=20),
    Model("1B", LLAMA_1B, 1024, (Target(1, 700, 1000), Target(32)), needs_s=10),
    # Without programmatic dependent launch, for comparison.
    Model("135M, late launch", SMOLLM2_135M, 512, (Target(1),), early_launch=False, needs_s=10),
    Model("1B, late launch", LLAMA_1B, 1024, (Target(1),), early_launch=False, needs_s=8),
    Model("8B, late launch", LLAMA_8B, 1024, (Target(1, in_ms=True),), early_launch=False, needs_s=10),
)
"""The most important figures come first."""


def items(context: Context) -> list[Item]:
    return [
        Item(model.name, partial(measure, model=model), model.needs_s, model.limit_s)
        for model in MODELS
        if not (context.small and not model.early_launch)
    ]


def measure(context: Context, model: Model, *, is_warm_up: bool = False) -> Iterator[Reading]:
    """Yield all figures of a model. As a warm-up, run everything once to compile it."""
    model = stand_in(context, model)
    num_steps = WARM_STEPS + (24 if context.small else 96)
    if context.interpreted:
        num_steps = 4
    max_model_len = model.context + num_steps * len(model.depths) + 2
    if is_warm_up and not context.interpreted:
        # Kernels don't depend on the number of layers.
        config = msgspec.structs.replace(model.config, num_layers=2)
        model, num_steps = replace(model, config=config, context=WARM_CONTEXT), 2
    before = gpu.memory_bytes()
    began_s = time.perf_counter()
    with started(model, num_steps, max_model_len) as runner:
        yield _recorded(model, runner, time.perf_counter() - began_s, gpu.memory_bytes() - before)
        for target in model.targets:
            if context.left_s < 6 and not context.interpreted:
                yield Reading(f"{model.name}, batch {target.batch}", result="cut", note="out of time")
                continue
            yield from _decode(context, model, target, runner, num_steps)


def stand_in(context: Context, model: Model) -> Model:
    """The model, or a tiny one if kernels are interpreted."""
    if not context.interpreted:
        return model
    targets = (Target(1, 1.0, 2.0), Target(2)) if model.name == "135M" else (Target(1),)
    return Model(model.name, TINY, 16, targets, model.quantization)


@contextmanager
def started(model: Model, num_steps: int, max_model_len: int) -> Iterator[Any]:
    """An executor with the model's weights, and KV memory for its largest batch over `num_steps` steps."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        model.config.save(folder)
        runner = _make(model, folder, num_steps, max_model_len)
        try:
            yield runner
        finally:
            close(runner)
            del runner
            gpu.free_memory()


def _make(model: Model, folder: Path, num_steps: int, max_model_len: int) -> Any:
    config = model.config
    num_blocks = (model.max_batch + 2) * steps.num_blocks(model.context + num_steps * len(model.depths) + 1)
    block = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, torch.bfloat16.itemsize)
    settings = settings_for(
        "cuda",
        max_model_len=max_model_len,
        kv_cache_bytes=max(num_blocks, steps.num_blocks(max_model_len)) * block,
        max_num_seqs=max(model.max_batch, 8),
        max_num_batched_tokens=BATCH_TOKENS if model.config is not TINY else 64,
        quantization=model.quantization,
        early_launch=model.early_launch,
    )
    return make_runner(settings, folder, WeightsOnDevice(config, torch.bfloat16))


def _recorded(model: Model, runner: Any, made_s: float, made_bytes: int) -> Reading:
    """Time the graph captures that a server makes before it is ready."""
    before = gpu.memory_bytes()
    began_s = time.perf_counter()
    runner.capture_graphs()
    took_s = time.perf_counter() - began_s
    num_bytes = gpu.memory_bytes() - before
    return Reading(
        f"{model.name}: first graphs",
        took_s,
        "s",
        must=3.0 if model.name == "135M" else None,
        less_is_better=True,
        note=f"{num_bytes / 2**20:,.0f} MiB; weights and KV {made_bytes / 2**30:.1f} GiB loaded in {made_s:.1f} s",
        numbers={"graph_bytes": num_bytes, "made_s": made_s, "made_bytes": made_bytes},
    )


def _decode(context: Context, model: Model, target: Target, runner: Any, num_steps: int) -> Iterator[Reading]:
    batch, config = target.batch, model.config
    name = f"{model.name}, batch {batch}"
    rows = SpeedRows(runner, config, batch, model.context, num_steps * len(model.depths))
    prefill_s = rows.prefill()
    if batch == model.max_batch and prefill_s:
        yield _prefill(context, model, rows, prefill_s)
    layer_bits = bits_in_groups(4, 128) if model.quantization == "int4" else 16.0
    moved = step_bytes(config, batch, model.context + num_steps // 2, layer_bits)
    bandwidth = rates.bandwidth(context)
    least_ms = moved.total / bandwidth * 1e3
    for depth in model.depths:
        made = rows.decode(num_steps, depth)
        yield _rate(context, target, made, least_ms, f"{name}, depth {depth}" if depth != 2 else name, depth == 2)
        if depth != 2:
            continue
        if made.busy is not None:
            is_bound = batch == model.max_batch and batch > 1
            yield Reading(
                f"{name}: GPU busy",
                made.busy * 100,
                "%",
                must=98 if is_bound else None,
                goal=99.4 if is_bound else None,
                note=f"median gap {made.gap_us:.0f} µs; a step takes {made.step_ms:.2f} ms on the GPU",
            )
        yield Reading(
            f"{name}: Python of a step",
            made.python_us,
            "µs",
            must=60,
            goal=30,
            less_is_better=True,
            note=f"CPU time of launch and collect; the launch alone takes {made.launch_us:.0f} µs",
        )
    rows.drop()


def _rate(context: Context, target: Target, made: "Decoded", least_ms: float, name: str, is_target: bool) -> Reading:
    factor = H200 if target.scales and not context.interpreted and "H200" in torch.cuda.get_device_name() else 1.0
    per_s = target.batch / made.each_ms * 1e3
    numbers = {"ms_per_step": made.each_ms, "tokens_per_s": per_s, "bound_ms": least_ms, "gpu_ms": made.step_ms}
    must, goal = target.must if is_target else None, target.goal if is_target else None
    if target.in_ms:
        must, goal = (None if limit is None else limit / factor for limit in (must, goal))
        return Reading(name, made.each_ms, "ms", least_ms, must, goal, less_is_better=True, numbers=numbers)
    must, goal = (None if limit is None else limit * factor for limit in (must, goal))
    return Reading(name, per_s, "tok/s", target.batch / least_ms * 1e3, must, goal, numbers=numbers)


def _prefill(context: Context, model: Model, rows: "SpeedRows", took_s: float) -> Reading:
    """Prompt tokens per second. The limit counts only the FLOPs of the matrix products."""
    flops = context.task.rates.get(rates.MATMUL)
    return Reading(
        f"{model.name}: prompts",
        rows.num_prompt_tokens / took_s,
        "tok/s",
        None if flops is None else flops * 1e12 / 2 / num_layer_weights(model.config),
        note=f"{BATCH_TOKENS} tokens a step, prompts of {model.context}",
    )


@dataclass(slots=True)
class Decoded:
    """Times of decode steps, without the first ones."""

    each_ms: float
    """From one result to the next, by the host's clock."""
    python_us: float
    launch_us: float
    step_ms: float
    """Median GPU time of a step; like the next two, from the GPU's timestamps"""
    gap_us: float
    busy: float | None
    """The part of the time in which a step ran; None without a GPU clock."""
    launched_steps: list[Any] = field(default_factory=list)


class SpeedRows:
    """Sequences of equal lengths, and the steps that compute them."""

    def __init__(self, runner: Any, config: ModelConfig, num: int, context: int, num_steps: int) -> None:
        self._runner = runner
        self._num, self._context = num, context
        self._ids = np.random.default_rng(3).integers(3, config.vocab_size, (num, context))
        self._blocks_each = steps.num_blocks(context + num_steps + 1)
        # Blocks are shuffled, as in a server that has run for a while.
        self._blocks = np.random.default_rng(4).permutation(runner.facts.num_blocks)
        self._each = min(num, max(1, BATCH_TOKENS // context))
        """Prompts per step."""
        self._num_known = context
        self.num_prompt_tokens = 0

    def prefill(self) -> float:
        """Compute all prompts. Returns the seconds for `num_prompt_tokens` tokens. The first step, which captures the
        graph, is not counted; 0 if there was no other."""
        began_s = 0.0
        for first in range(0, self._num, self._each):
            rows = range(first, min(first + self._each, self._num))
            adds = [self._add(row) for row in rows]
            entries = [(row, 0, self._context, True) for row in rows]
            self._launch(steps.step(entries, adds), 2)
            if first == 0:
                self._runner.drain()
                began_s = time.perf_counter()
            else:
                self.num_prompt_tokens += len(rows) * self._context
        self._runner.drain()
        self._num_known = self._context + 1
        return time.perf_counter() - began_s if self.num_prompt_tokens else 0.0

    def decode(self, num_steps: int, depth: int) -> Decoded:
        """Run `num_steps` steps of all rows, `depth` of them in flight."""
        messages = [self._step(self._num_known - 1 + i) for i in range(num_steps)]
        first = min(WARM_STEPS, num_steps - 2)
        self._num_known += num_steps
        launched_steps: list[Any] = []
        collected_s: list[float] = []
        python_s = 0.0
        for message in messages:
            began_s = time.thread_time()
            if len(self._runner.launched_steps) == depth:
                self._runner.collect()
                collected_s.append(time.perf_counter())
            launched_steps.append(self._runner.launch(message, steps.take))
            if len(launched_steps) > first + 1:
                python_s += time.thread_time() - began_s
        while self._runner.launched_steps:
            self._runner.collect()
            collected_s.append(time.perf_counter())
        counted = launched_steps[first + 1 :]
        return Decoded(
            each_ms=(collected_s[-1] - collected_s[first]) / (num_steps - 1 - first) * 1e3,
            python_us=python_s / len(counted) * 1e6,
            launch_us=median(launched_step.launch_s for launched_step in counted) * 1e6,
            **_on_gpu(counted),
            launched_steps=counted,
        )

    def drop(self) -> None:
        """Drop all rows."""
        self._runner.step(steps.step(drops=list(range(self._num))), steps.take)

    def _launch(self, message: m.Step, depth: int) -> None:
        while len(self._runner.launched_steps) >= depth:
            self._runner.collect()
        self._runner.launch(message, steps.take)

    def _add(self, row: int) -> m.RowAdd:
        begin = row * self._blocks_each
        blocks = self._blocks[begin : begin + self._blocks_each].tolist()
        return steps.row_add(row, self._ids[row].tolist(), blocks)

    def _step(self, start: int) -> m.Step:
        return steps.step([(row, start, 1, True) for row in range(self._num)])


def _on_gpu(launched_steps: Sequence[Any]) -> dict[str, Any]:
    """Statistics of the GPU's timestamps."""
    stamps = [(launched_step.start_ns, launched_step.end_ns) for launched_step in launched_steps]
    if not stamps or not stamps[0][0]:
        return {"step_ms": 0.0, "gap_us": 0.0, "busy": None}
    steps_ns = [end - start for start, end in stamps]
    gaps_ns = [later[0] - earlier[1] for earlier, later in pairwise(stamps)]
    return {
        "step_ms": median(steps_ns) / 1e6,
        "gap_us": median(gaps_ns) / 1e3 if gaps_ns else 0.0,
        "busy": sum(steps_ns) / (stamps[-1][1] - stamps[0][0]),
    }
