"""Compares whole models with the CPU executor where a feature changes what a GPU launches: LoRA adapters, mixtures of
experts, a cache in 8 bits, embeddings, and speculative decoding with a draft model and an EAGLE head.

Numbers are float32, so that nearly all ids are equal. See texts.py for what is compared where outputs diverge.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.settings import LoraSettings, Settings, SpeculativeSettings
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime import messages as m
from pipeline.runtime.model.draft_link import draft_link
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring import planned as steps
from tools.gpu_check import models
from tools.gpu_check.child import Context, Item
from tools.gpu_check.readings import Reading, Result, check
from tools.gpu_check.runners import close, make_cpu_runner, make_runner
from tools.gpu_check.servers.texts import BATCH_TOKENS, SAMPLING, SCHEDULES, Driver, Plan, judge, settings_of
from tools.gpu_check.shapes import SMALL, TINY

WHOLE, BATCHED = SCHEDULES[0], SCHEDULES[3]
RANK, NUM_ADAPTERS = 8, 2
NUM_DRAFTS = 4
LARGEST_ERROR = 1e-3
"""Of a number of an embedding, whose vector has the length 1."""


def items(context: Context) -> list[Item]:
    runs: dict[str, Callable[[Context], Iterator[Reading]]] = {
        "cache in 8 bits": _int8_cache,
        "mixture of experts": _experts,
        "LoRA adapters": _adapters,
        "embeddings": _embeddings,
        "its own draft model": partial(
            _speculation, "the model as its own draft model", "draft_model", _as_draft_model, must_accept=True
        ),
        "another draft model": partial(_speculation, "another draft model", "draft_model", _other_draft_model),
        "EAGLE head": partial(_speculation, "EAGLE head", "eagle", _eagle_head),
    }
    return [Item(name, run, 10, 100) for name, run in runs.items()]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both executors, with a prepared folder."""

    exact: Driver
    ours: Driver


def _plan(context: Context, config: ModelConfig) -> Plan:
    rng = np.random.default_rng(6)
    lengths = (25, 9, 3) if context.interpreted else (130, 64, 33, 9, 1)
    return Plan([rng.integers(3, config.vocab_size, n).tolist() for n in lengths], 4 if context.interpreted else 24)


def _prepared(context: Context, folder: Path, seed: int = 21) -> ModelConfig:
    return models.write_prepared(folder, TINY if context.interpreted else SMALL, seed)


def _pair(stack: ExitStack, folder: Path, plan: Plan, settings: Settings, on_cpu: Settings) -> Pair:
    """Executors with these settings, until `stack` is closed."""
    exact = Driver(make_cpu_runner(on_cpu, folder), plan)
    stack.callback(close, exact.runner)
    exact.keep_logits()
    ours = Driver(make_runner(settings, folder), plan)
    stack.callback(close, ours.runner)
    ours.runner.capture_graphs()
    return Pair(exact, ours)


def _both(config: ModelConfig, plan: Plan, **sizes: Any) -> tuple[Settings, Settings]:
    """Settings in float32 for the GPU and for the CPU."""
    return settings_of(config, plan, "float32", "cuda", **sizes), settings_of(config, plan, "float32", "cpu", **sizes)


def _int8_cache(context: Context) -> Iterator[Reading]:
    """Numbers near the middle of two codes get either, so the bound is that of bfloat16."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name, ExitStack() as stack:
        config = _prepared(context, Path(name))
        plan = _plan(context, config)
        num_bytes = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, 1)
        both = [
            msgspec.structs.replace(each, execute=msgspec.structs.replace(each.execute, kv_dtype="int8"))
            for each in _both(config, plan, num_bytes=num_bytes)
        ]
        pair = _pair(stack, Path(name), plan, *both)
        for schedule in (WHOLE, BATCHED):
            expected, found = pair.exact.of(WHOLE, steps.GREEDY), pair.ours.of(schedule, steps.GREEDY)
            yield judge(f"cache in 8 bits, {schedule.name}", pair.exact, steps.GREEDY, expected, found, "bfloat16")


def _experts(context: Context) -> Iterator[Reading]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name, ExitStack() as stack:
        folder = models.prepared_mixture(Path(name), TINY if context.interpreted else SMALL, seed=22)
        config = ModelConfig.load(folder)
        plan = _plan(context, config)
        pair = _pair(stack, folder, plan, *_both(config, plan))
        for schedule in (WHOLE, BATCHED):
            expected, found = pair.exact.of(WHOLE, steps.GREEDY), pair.ours.of(schedule, steps.GREEDY)
            yield judge(f"mixture of experts, {schedule.name}", pair.exact, steps.GREEDY, expected, found, "float32")


def _adapters(context: Context) -> Iterator[Reading]:
    """Rows of two adapters and of none, in a batch."""
    from pipeline.lora.convert import convert

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name, ExitStack() as stack:
        folder = Path(name)
        config = _prepared(context, folder)
        sources = [models.write_adapter(folder / f"adapter-{i}", config, RANK, seed=i) for i in range(NUM_ADAPTERS)]
        ids = ["", *(convert(source, folder, "f32", RANK) for source in sources)]
        plan = _plan(context, config)
        lora = LoraSettings(
            runtime_loading=True, max_loras=NUM_ADAPTERS, max_cpu_loras=NUM_ADAPTERS, max_lora_rank=RANK
        )
        both = [msgspec.structs.replace(each, lora=lora) for each in _both(config, plan)]
        pair = _pair(stack, folder, plan, *both)
        replace = msgspec.structs.replace
        options = [replace(steps.GREEDY, adapter_id=ids[i % len(ids)]) for i in range(len(plan.prompts))]
        expected, found = pair.exact.of(WHOLE, options), pair.ours.of(BATCHED, options)
        yield judge("two adapters and none in a batch", pair.exact, options, expected, found, "float32")
        for adapter_id in ids[1:]:
            alone = replace(SAMPLING["random"], adapter_id=adapter_id)
            expected, found = pair.exact.of(WHOLE, alone), pair.ours.of(WHOLE, alone)
            yield judge(f"adapter {ids.index(adapter_id)}, random", pair.exact, alone, expected, found, "float32")


def _embeddings(context: Context) -> Iterator[Reading]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name, ExitStack() as stack:
        config = _prepared(context, Path(name))
        plan = _plan(context, config)
        pair = _pair(stack, Path(name), plan, *_both(config, plan))
        for pooling in (m.Pooling.MEAN, m.Pooling.LAST):
            expected, found = (_embed(driver, pooling) for driver in (pair.exact, pair.ours))
            worst = float(np.abs(expected - found).max())
            note = f"{len(expected)} vectors of {expected.shape[1]} numbers; the value is the largest error"
            yield check(f"embeddings, {pooling.name.lower()}", worst, LARGEST_ERROR, note)


def _embed(driver: Driver, pooling: m.Pooling) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """The embeddings of the prompts, each of length 1, in chunks beside each other: [prompts, H]."""
    options = m.GenerationOptions(pooling=pooling)
    prompts = driver.plan.prompts
    first_blocks = np.cumsum([0, *(steps.num_blocks(len(prompt) + 1) for prompt in prompts)]).tolist()
    adds = [
        steps.row_add(row, prompt, range(first_blocks[row], first_blocks[row + 1]), options)
        for row, prompt in enumerate(prompts)
    ]
    vectors: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
    computed = [0] * len(prompts)
    while any(num < len(prompt) for num, prompt in zip(computed, prompts, strict=True)):
        entries: list[steps.Entry] = []
        left = BATCH_TOKENS
        for row, prompt in enumerate(prompts):
            if count := min(len(prompt) - computed[row], left):
                entries.append((row, computed[row], count, computed[row] + count == len(prompt)))
                computed[row], left = computed[row] + count, left - count
        sampled = driver.runner.step(steps.step(entries, adds), steps.take)
        adds = []
        outputs = np.frombuffer(sampled.token_outputs, np.float32).reshape(len(sampled.rows), -1)
        vectors |= dict(zip(sampled.rows.tolist(), outputs, strict=True))
    driver.runner.step(steps.step(drops=list(range(len(prompts)))), steps.take)
    found = np.stack([vectors[row] for row in range(len(prompts))])
    made: np.ndarray[Any, np.dtype[np.float32]] = found / np.linalg.norm(found, axis=1, keepdims=True)
    return made


Start = Callable[[Context, Settings, Path], int]
"""Prepares what proposes ids, for a model in a folder. Returns the bytes of a block of its cache."""


def _speculation(
    what: str, method: Any, start: Start, context: Context, *, must_accept: bool = False
) -> Iterator[Reading]:
    """Texts with proposed ids, against those of the CPU without. With `must_accept`, some ids must be proposed
    rightly."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name, ExitStack() as stack:
        folder = Path(name) / "model"
        config = _prepared(context, folder)
        plan = _plan(context, config)
        where = {"model": str(folder), "cache_dir": str(Path(name) / "cache")}
        speculative = SpeculativeSettings(
            method=method, draft=str(Path(name) / "draft"), num_speculative_tokens=NUM_DRAFTS
        )
        on_gpu, on_cpu = _both(config, plan)
        on_gpu = msgspec.structs.replace(on_gpu, speculative=speculative, **where)
        num_more = start(context, on_gpu, folder)
        cache_bytes = _both(config, plan, num_more=num_more)[0].execute.kv_cache_bytes
        execute = msgspec.structs.replace(on_gpu.execute, kv_cache_bytes=cache_bytes)
        on_gpu = msgspec.structs.replace(on_gpu, execute=execute)
        pair = _pair(stack, folder, plan, on_gpu, on_cpu)
        pair.ours.num_drafts = NUM_DRAFTS
        for sampling_name, options in SAMPLING.items():
            expected, found = pair.exact.of(WHOLE, options), pair.ours.of(BATCHED, options)
            case = f"{what}, {sampling_name}"
            reading = judge(case, pair.exact, options, expected, found, "float32")
            note = f"{reading.note}; {pair.ours.num_accepted} proposed ids were accepted in all"
            yield dataclasses.replace(
                reading, note=note, numbers=reading.numbers | {"accepted": pair.ours.num_accepted}
            )
        if must_accept:
            result: Result = "pass" if pair.ours.num_accepted else "FAIL"
            yield Reading(f"{what}: proposed ids are accepted", result=result)


def _as_draft_model(context: Context, settings: Settings, folder: Path) -> int:
    return _link_draft(settings, folder)


def _other_draft_model(context: Context, settings: Settings, folder: Path) -> int:
    other = Path(settings.speculative.draft)
    _prepared(context, other, seed=29)
    return _link_draft(settings, other)


def _link_draft(settings: Settings, prepared: Path) -> int:
    link = draft_link(settings)
    link.parent.mkdir(parents=True)
    link.symlink_to(prepared)
    config = ModelConfig.load(prepared)
    return block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, 4)


def _eagle_head(context: Context, settings: Settings, folder: Path) -> int:
    from pipeline.stages.prepare.drafts import draft
    from pipeline.stages.prepare.drafts.eagle import prepare_head
    from pipeline.stages.prepare.stage import SILENT

    config = ModelConfig.load(folder)
    models.write_eagle_head(Path(settings.speculative.draft), config, seed=31)
    draft.link(settings, prepare_head(settings, folder, SILENT), SILENT)
    return block_bytes(1, config.num_kv_heads, config.head_dim, 4)
