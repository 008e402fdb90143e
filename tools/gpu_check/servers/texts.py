"""Compares the ids that the GPU executor samples for whole models with those of the CPU executor, which uses torch.

Weights are random. Where two outputs diverge, the float32 CPU executor measures the gap between the two ids. A small
gap is a rounding difference; a wrong kernel produces large gaps.
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.config.settings import Settings
from pipeline.kernels.sampling.logits_processors import apply_logits_processors
from pipeline.kernels.sampling.noise import exponential, halves
from pipeline.kernels.sampling.noise_keys import noise_keys, sequence_key
from pipeline.kernels.sampling.sample import thresholds
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring import planned as steps
from pipeline.stages.execute.sampling_features import logits_processors_of
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.models import write_prepared
from tools.gpu_check.readings import Reading
from tools.gpu_check.runners import close, make_cpu_runner, make_runner, settings_for
from tools.gpu_check.servers import in_flight
from tools.gpu_check.shapes import SMALL, TINY

ALLOWED = {"float32": 4e-3, "bfloat16": 0.2}
"""Largest gap between two ids at a divergence, in standard deviations of the logits."""
PREFIX = 48
"""Ids shared by rows with a cached prefix: three blocks."""
BATCH_TOKENS = 48
"""Token budget of a step that mixes prefill and decode."""
MAX_TOKENS = 2**31 - 1

SAMPLING = {
    "greedy": steps.GREEDY,
    "random": m.GenerationOptions(temperature=0.9, seed=17, ignore_eos=True),
    "logits processors": m.GenerationOptions(
        temperature=0.0,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.3,
        bias_ids=[5, 40],
        bias_values=[1.5, -2.0],
        bad_words_ids=[[7], [8, 9]],
        num_logprobs=3,
    ),
    "random, filtered": m.GenerationOptions(temperature=1.2, seed=23, top_k=50, top_p=0.9, min_p=0.01, ignore_eos=True),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A way in which a scheduler may compute a prompt."""

    name: str
    chunk: int | None = None
    """Most tokens of a row in a step."""
    budget: int = MAX_TOKENS
    """Most tokens of a step."""
    is_batched: bool = False
    """All prompts in one batch, instead of one after the other."""
    shares: bool = False
    """The first `PREFIX` ids are in blocks that another row has computed."""


SCHEDULES = (
    Schedule("whole"),
    Schedule("in chunks of 33", chunk=33),
    Schedule("in chunks of 7", chunk=7),
    Schedule("all in one batch", budget=BATCH_TOKENS, is_batched=True),
    Schedule("behind a cached prefix", budget=BATCH_TOKENS, is_batched=True, shares=True),
)


def items(context: Context) -> list[Item]:
    dtypes = ("bfloat16", "float32") if not context.interpreted else ("float32",)
    made = [Item(f"small model, {dtype}", partial(_small, dtype=dtype), 10, 130) for dtype in dtypes]
    made.append(Item("steps in flight", partial(in_flight.compare, early=False), 10, 100))
    if not context.interpreted:
        made.append(Item("small model, early launches", partial(_small, dtype="bfloat16", early=True), 10, 100))
        made.append(Item("steps in flight, early launches", partial(in_flight.compare, early=True), 10, 100))
    if context.task.model:
        made.append(Item("given model", _given, 10, 120))
    return made


def _small(context: Context, dtype: str, *, early: bool = False) -> Iterator[Reading]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        config = write_prepared(folder, TINY if context.interpreted else SMALL, seed=11)
        rng = np.random.default_rng(5)
        lengths = (61, 50, 17, 1) if context.interpreted else (211, 90, 130, 64, 49, 33, 17, 16, 1)
        prompts = [rng.integers(3, config.vocab_size, length).tolist() for length in lengths]
        num_new = 2 if context.interpreted else 24
        yield from _compare(context, folder, config, dtype, prompts, num_new, early=early)


def _given(context: Context) -> Iterator[Reading]:
    from pipeline.stages.prepare.stage import prepare

    assert context.task.model is not None
    folder = prepare(msgspec.structs.replace(Settings(), model=context.task.model, quantization="none"))
    config = ModelConfig.load(folder)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, config.vocab_size, length).tolist() for length in (120, 70, 33, 7)]
    yield from _compare(context, folder, config, "bfloat16", prompts, num_new=24)


def _compare(
    context: Context,
    folder: Path,
    config: ModelConfig,
    dtype: str,
    prompts: list[list[int]],
    num_new: int,
    *,
    early: bool = False,
) -> Iterator[Reading]:
    """Compare every schedule and every kind of sampling. With `early`, kernels use programmatic dependent launch, and
    only the first schedule, which decodes few rows, is run."""
    # The first two prompts share a prefix.
    prompts[1] = prompts[0][:PREFIX] + prompts[1][PREFIX:]
    plan = Plan(prompts, num_new)
    exact = Driver(make_cpu_runner(settings_of(config, plan, "float32", "cpu"), folder), plan)
    settings = settings_of(config, plan, dtype, "cuda")
    execute = msgspec.structs.replace(settings.execute, programmatic_dependent_launch=early)
    ours = Driver(make_runner(msgspec.structs.replace(settings, execute=execute), folder), plan)
    what = f"{config.name} {dtype}{', early' * early}"
    try:
        exact.keep_logits()
        schedules = SCHEDULES[:1] if early else SCHEDULES if not context.interpreted else (SCHEDULES[0], SCHEDULES[4])
        for sampling_name, options in SAMPLING.items():
            expected = exact.of(SCHEDULES[0], options)
            for schedule in schedules if sampling_name == "greedy" else schedules[-1:]:
                found = ours.of(schedule, options)
                yield judge(f"{what}, {sampling_name}, {schedule.name}", exact, options, expected, found, dtype)
        if not context.small or context.interpreted:
            yield _without_syncs(ours, what)
    finally:
        close(exact.runner)
        close(ours.runner)


def settings_of(
    config: ModelConfig, plan: "Plan", dtype: str, device: str, *, num_bytes: int = 0, num_more: int = 0
) -> Settings:
    """Settings with just enough KV memory for the plan. `num_bytes` are those of a block, if it is no usual one, and
    `num_more` those of one in a second cache."""
    element: torch.dtype = getattr(torch, dtype)
    num_bytes = num_bytes or block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, element.itemsize)
    num_bytes += num_more
    num_blocks = sum(steps.num_blocks(length) for length in plan.lengths) + 2 * len(plan.lengths)
    return settings_for(
        device,
        dtype=dtype,
        max_model_len=max(plan.lengths) + 1,
        kv_cache_bytes=max(num_blocks * num_bytes, 1024**2),
        max_num_seqs=len(plan.lengths),
        max_num_batched_tokens=max(*plan.lengths, BATCH_TOKENS),
    )


def judge(
    case: str,
    exact: "Driver",
    options: m.GenerationOptions | Sequence[m.GenerationOptions],
    expected: list[list[int]],
    found: list[list[int]],
    dtype: str,
) -> Reading:
    """Count equal ids, and find the largest gap between two ids at a divergence. `options` may be those of each
    prompt."""
    of_prompts = [options] * len(expected) if isinstance(options, m.GenerationOptions) else options
    same, worst = 0, 0.0
    for prompt, own, right, ours in zip(exact.plan.prompts, of_prompts, expected, found, strict=True):
        assert len(right) == len(ours)
        parted = next((i for i, pair in enumerate(zip(right, ours, strict=True)) if pair[0] != pair[1]), None)
        same += len(right) if parted is None else parted
        if parted is not None:
            ids = [*prompt, *right[:parted]]
            worst = max(worst, exact.gap(ids, len(prompt), right[parted], ours[parted], own))
    num = sum(map(len, expected))
    note = f"{same} of {num} ids before outputs diverge; the value is the largest gap there, in standard deviations"
    return Reading(
        case,
        worst,
        bound=ALLOWED[dtype],
        less_is_better=True,
        result="pass" if worst <= ALLOWED[dtype] else "FAIL",
        note=note,
        numbers={"same": same, "ids": num},
    )


def _without_syncs(ours: "Driver", case: str) -> Reading:
    """Generate with torch's sync check on: a launch that waits for the GPU raises an error."""
    # The first run may wait, because it captures graphs.
    ours.of(SCHEDULES[3], SAMPLING["random, filtered"])
    ours.strict = True
    try:
        ours.of(SCHEDULES[3], SAMPLING["random, filtered"])
    finally:
        ours.strict = False
    return Reading(f"{case}: launches don't synchronize", result="pass")


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts and the number of ids to generate."""

    prompts: list[list[int]]
    num_new: int

    @property
    def lengths(self) -> list[int]:
        return [len(prompt) + self.num_new for prompt in self.prompts]


class Driver:
    """Runs one executor, of either device."""

    def __init__(self, runner: Any, plan: Plan) -> None:
        self.runner = runner
        self.plan = plan
        self.strict = False
        """Raise an error if a launch waits for the GPU."""
        self.num_drafts = 0
        """Ids to propose for each row that decodes, if the runner does."""
        self.num_accepted = 0

    def keep_logits(self) -> None:
        self.runner.program.keep_logits()

    def of(self, schedule: Schedule, options: m.GenerationOptions | Sequence[m.GenerationOptions]) -> list[list[int]]:
        """Generate from each prompt, with an empty KV cache. `options` may be those of each prompt."""
        prompts = self.plan.prompts
        of_prompts = [options] * len(prompts) if isinstance(options, m.GenerationOptions) else options
        if schedule.is_batched:
            first = prompts[0][:PREFIX]
            shared = [PREFIX if schedule.shares and p[:PREFIX] == first and len(p) > PREFIX else 0 for p in prompts]
            return self._texts(prompts, schedule, of_prompts, shared)
        pairs = zip(prompts, of_prompts, strict=True)
        return [text for prompt, own in pairs for text in self._texts([prompt], schedule, [own], [0])]

    def gap(self, ids: list[int], num_prompt: int, right: int, ours: int, options: m.GenerationOptions) -> float:
        """How far the score of id `ours` lies below that of `right` after `ids`, in standard deviations of the logits.
        `ids` begins with a prompt of `num_prompt` ids. For random sampling the scores include noise and filters."""
        logits = self._logits(ids, options.adapter_id)
        spread = float(logits.std())
        logits_processors = logits_processors_of(options, np.array(ids, np.int32), num_prompt, [], len(logits))
        if logits_processors is not None:
            apply_logits_processors(logits, logits_processors, len(ids))
        if options.temperature == 0:
            return float(logits[right] - logits[ours]) / spread
        scaled = (logits - logits.max()) / options.temperature
        key = noise_keys(np.array([sequence_key(options.seed, 0)], np.uint64), np.array([len(ids)]))
        race = scaled - exponential(halves(key), len(logits))[0].log()
        unit = spread / options.temperature
        floor = thresholds(
            scaled[None],
            torch.tensor([options.top_k]),
            torch.tensor([options.top_p]),
            torch.tensor([options.min_p]),
        )[0]
        # Either id may lie at the filters' threshold.
        at_edge = min(abs(float(scaled[i] - floor)) for i in (right, ours)) / unit
        return min(float(race[right] - race[ours]) / unit, at_edge) if race[right] >= race[ours] else at_edge

    def _logits(self, ids: list[int], adapter_id: str) -> torch.Tensor:
        options = msgspec.structs.replace(steps.GREEDY, adapter_id=adapter_id)
        add = steps.row_add(0, ids, range(steps.num_blocks(len(ids) + 1)), options)
        self._step([add], [(0, 0, len(ids), True)])
        logits = torch.from_numpy(self.runner.program.logits()[0].copy())
        self._step([], [], [0])
        return logits

    def _texts(
        self,
        prompts: Sequence[list[int]],
        schedule: Schedule,
        options: Sequence[m.GenerationOptions],
        shared: Sequence[int],
    ) -> list[list[int]]:
        computed = list(shared)
        common = list(range(steps.num_blocks(max(computed))))
        next_block = len(common)
        if common:
            self._step([steps.row_add(0, prompts[0][:PREFIX], common)], [(0, 0, PREFIX, False)])
            self._step([], [], [0])
        adds = []
        for row, prompt in enumerate(prompts):
            theirs = common[: steps.num_blocks(computed[row])]
            own = steps.num_blocks(len(prompt) + self.plan.num_new) - len(theirs)
            adds.append(steps.row_add(row, prompt, [*theirs, *range(next_block, next_block + own)], options[row]))
            next_block += own
        known = [list(prompt) for prompt in prompts]
        wanted = [len(prompt) + self.plan.num_new for prompt in prompts]
        while any(len(ids) < num for ids, num in zip(known, wanted, strict=True)):
            left = schedule.budget
            entries: list[steps.Entry] = []
            drafts = []
            for row, ids in enumerate(known):
                count = min(len(ids) - computed[row], schedule.chunk or left, left)
                if count and len(ids) < wanted[row]:
                    entries.append((row, computed[row], count, computed[row] + count == len(ids)))
                    computed[row] += count
                    left -= count
                    decodes = count == 1 and computed[row] > len(prompts[row])
                    drafts.append(min(self.num_drafts, wanted[row] - len(ids) - 1) if decodes else 0)
            for row, new in self._step(adds, entries, drafts=drafts if any(drafts) else ()):
                known[row] += new
                computed[row] += len(new) - 1
            adds = []
        self._step([], [], list(range(len(prompts))))
        return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]

    def _step(
        self,
        adds: Sequence[m.RowAdd],
        entries: Sequence[steps.Entry],
        drops: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> list[tuple[int, list[int]]]:
        """Run a step. Returns the new ids of each row that has any."""
        message = steps.step(entries, adds, drops, drafts)
        if self.strict:
            with gpu.no_syncs():
                self.runner.launch(message, steps.take)
            sampled = self.runner.collect()
        else:
            sampled = self.runner.step(message, steps.take)
        rows, ids = sampled.rows.tolist(), sampled.ids.tolist()
        num_ids = sampled.num_ids.tolist() or [1] * len(rows)
        ends = list(itertools.accumulate(num_ids))
        self.num_accepted += len(ids) - len(rows)
        return [(row, ids[end - num : end]) for row, num, end in zip(rows, num_ids, ends, strict=True)]
