"""With sliding windows and a real scheduler that preempts, chunks and shares prefixes, texts equal those of
transformers, and in the CPU library those of each row alone."""

import itertools
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.rig import raw
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import GREEDY, settings, take
from tests.stages.execute.native_driver import ISAS, emulation, random_ids, write
from tests.stages.execute.pair import NUM_THREADS

VARIANTS: dict[str, dict[str, Any]] = {
    "every layer": {"architecture": "mistral", "sliding_window": 21},
    "some layers": checkpoints.VARIANTS["qwen3, windows between"],
}
NUM_BLOCKS = {
    ("every layer", False): (40, 12),
    ("every layer", True): (40, 5),
    ("some layers", False): (40, 12),
    ("some layers", True): (80, 20),
}
"""Blocks by variant, and whether there are KV groups: enough, and so few that rows are preempted."""
CASES = [(VARIANTS[name], has_groups, *num) for (name, has_groups), num in NUM_BLOCKS.items()]
IDS = [f"{name}, groups" if has_groups else name for name, has_groups in NUM_BLOCKS]
NUM_TOKENS = 40
PREFIX = random_ids(48, 0)
PROMPTS = [
    random_ids(70, 1),
    PREFIX + random_ids(5, 2),
    PREFIX + random_ids(20, 3),
    PREFIX[:32] + random_ids(11, 4),
    random_ids(3, 5),
    PREFIX + random_ids(5, 2),
]
DEPTH = 2


def serve(runner: CpuRunner, num_blocks: int) -> tuple[list[list[int]], int, int]:
    """Greedy texts of all prompts, one of which arrives after each step, with a scheduler and this many blocks. Returns
    them, the number of preemptions, and the number of tokens found in the prefix cache."""
    limits = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=250,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        kv_groups=tuple(runner.facts.kv_groups),
    )
    scheduler = Scheduler(limits)
    texts: dict[int, list[int]] = {}
    waiting = deque(enumerate(PROMPTS, 1))
    steps: deque[m.Step] = deque()
    num_starts = num_cached = 0
    for turn in itertools.count():
        assert turn < 2000, "it never ends"
        if waiting and turn % 3 == 0:
            number, prompt = waiting.popleft()
            message = m.Admit(
                request_id=number,
                attempt=1,
                gateway=0,
                arrival_s=float(number),
                prompt_ids=np.array(prompt, np.int32).tobytes(),
                options=raw(msgspec.structs.replace(GREEDY, max_tokens=NUM_TOKENS)),
            )
            for opening in scheduler.admit(message):
                assert isinstance(opening, m.Open)
                texts[opening.seq] = []
        while len(steps) < DEPTH and (step := scheduler.plan()) is not None:
            steps.append(step)
            num_starts += len(step.adds)
            added = [add.row for add in step.adds]
            entries = zip(take(step.rows, np.int32).tolist(), take(step.starts, np.int32).tolist(), strict=True)
            num_cached += sum(start for row, start in entries if row in added)
        if not steps:
            if waiting:
                continue
            break
        step = steps.popleft()
        sampled = runner.step(step, take)
        scheduler.settle(
            m.StepResult(
                incarnation=step.incarnation,
                step_id=step.step_id,
                rows=sampled.rows.astype(np.int32).tobytes(),
                generations=sampled.generations.tobytes(),
                ids=sampled.ids.tobytes(),
                finishes=sampled.finishes.tobytes(),
                compute_s=0.0,
                wait_s=0.0,
            )
        )
        scheduler.check()
        if (report := scheduler.output_buffer.pending()) is not None:
            scheduler.output_buffer.mark_sent()
            ids = take(report.ids, np.int32).tolist()
            counts = take(report.counts, np.int32).tolist()
            for seq, num in zip(take(report.seqs, np.uint64).tolist(), counts, strict=True):
                texts[seq] += ids[:num]
                ids = ids[num:]
    return list(texts.values()), num_starts - len(PROMPTS), num_cached


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("changes", "has_groups", "enough", "few"), CASES, ids=IDS)
def test_texts_equal_those_of_transformers_despite_preemption_and_cached_prefixes(
    tmp_path: Path, changes: dict[str, Any], has_groups: bool, enough: int, few: int
) -> None:
    model = checkpoints.write(tmp_path, checkpoints.config_of(**changes))
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    runner = CpuRunner(settings(kernels="torch", hybrid_kv_cache_manager=has_groups), tmp_path)
    texts, num_again, num_cached = serve(runner, enough)
    assert (texts, num_again) == (expected, 0)
    assert num_cached >= 48
    runner = CpuRunner(settings(kernels="torch", hybrid_kv_cache_manager=has_groups), tmp_path)
    texts, num_again, _ = serve(runner, few)
    assert texts == expected
    assert num_again > 0, "no row was preempted"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("changes", "has_groups", "enough", "few"), CASES, ids=IDS)
def test_texts_of_the_library_do_not_depend_on_scheduling(
    tmp_path: Path, changes: dict[str, Any], has_groups: bool, enough: int, few: int, isa: str
) -> None:
    write(tmp_path, checkpoints.config_of(**changes))
    with emulation(isa) as kernels:
        config = settings(dtype="bfloat16", kernels=kernels, threads=NUM_THREADS, hybrid_kv_cache_manager=has_groups)
        runners = [CpuRunner(config, tmp_path) for _ in range(2)]
    plenty, _, num_cached = serve(runners[0], enough)
    scarce, num_again, _ = serve(runners[1], few)
    for runner in runners:
        runner.close()
    assert plenty == scarce
    assert num_again > 0 and num_cached >= 48
    assert len({tuple(text) for text in plenty}) == 5, "different prompts have the same text"
