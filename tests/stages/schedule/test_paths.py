"""Every feature on every path of the planner: it excludes the path, or nothing differs on it.

The tables below name each option of a request, each setting of the scheduler and each flag of a row. A new one fails
here until someone has decided what its rows need (stages/schedule/row_flags.py), and then runs on each path.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish, GenerationOptions, Pooling, ReasoningBudget
from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.stages.schedule import row_flags
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig, StateConfig
from tests.fakes import expected
from tests.stages.schedule.bench import Bench, config

PROMPTS = [range(5), range(100, 121), range(200, 213)]
NUM_STEPS = 24
MAX_TOKENS = 60
STOP_ID = expected(list(PROMPTS[-1]), GenerationOptions(), 0, MAX_TOKENS)[0][40]


class Feature(NamedTuple):
    """An option of the last request, or a setting, that is not the default."""

    value: Any
    flags: int = 0
    """What a row with it needs, or all rows."""
    settings: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012
    """What else the request needs for it."""


PATHS: dict[RowFlag, tuple[bool, bool]] = {
    RowFlag.BEAM: (False, False),
    RowFlag.DRAFTS: (False, False),
    RowFlag.LOGPROBS: (True, False),
    RowFlag.PREDICTION: (True, True),
    RowFlag.FULL_PREFILL: (True, True),
    RowFlag.KV_GROUPS: (True, False),
    RowFlag.OFFLOAD: (True, False),
    RowFlag.PIPELINED: (True, False),
    RowFlag.STATE: (True, False),
    RowFlag.PACED: (False, False),
    RowFlag.MEDIA: (True, True),
}
"""By flag: whether rows with it are planned ahead, and in decode runs."""

BEAMS = {"use_beam_search": True, "n": 2}

OPTIONS = {
    "n": Feature(3),
    "max_tokens": Feature(50),
    "temperature": Feature(0.0),
    "top_p": Feature(0.5),
    "top_k": Feature(5),
    "min_p": Feature(0.1),
    "seed": Feature(7),
    "repetition_penalty": Feature(1.1),
    "presence_penalty": Feature(0.5),
    "frequency_penalty": Feature(0.5),
    "bias_ids": Feature([STOP_ID]),  # at which the fake executor fails
    "bias_values": Feature([1.0]),
    "allowed_ids": Feature(np.arange(900, dtype=np.int32).tobytes()),
    "bad_words": Feature(["word"]),
    "bad_words_ids": Feature([[3, 4]]),
    "min_tokens": Feature(5),
    "stop": Feature(["stop"]),
    "stop_token_ids": Feature([STOP_ID]),
    "ignore_eos": Feature(True),
    "include_stop_str_in_output": Feature(True),
    "skip_special_tokens": Feature(False),
    "num_logprobs": Feature(2, RowFlag.LOGPROBS),
    "num_prompt_logprobs": Feature(1, RowFlag.LOGPROBS | RowFlag.FULL_PREFILL),
    "with_pieces": Feature(True),
    "pooling": Feature(Pooling.MEAN, RowFlag.FULL_PREFILL),  # the fake executor's hidden states have no dimensions
    "grammar": Feature(m.Grammar("regex", "a+")),
    "compiled_grammar": Feature("grammar"),
    "priority": Feature(-1, settings={"policy": "priority"}),
    "cache_salt": Feature("salt"),
    "logprob_token_ids": Feature([3], RowFlag.LOGPROBS, options={"num_logprobs": 1}),
    "prediction": Feature("text"),
    "predicted_ids": Feature(np.arange(9, dtype=np.int32).tobytes(), RowFlag.PREDICTION),
    "adapter_id": Feature("adapter", settings={"max_loras": 1}),
    "use_beam_search": Feature(True, RowFlag.BEAM | RowFlag.LOGPROBS, options=BEAMS),
    "length_penalty": Feature(2.0, RowFlag.BEAM | RowFlag.LOGPROBS, options=BEAMS),
    "early_stopping": Feature(True, RowFlag.BEAM | RowFlag.LOGPROBS, options=BEAMS),
    "repeats_received": Feature(True),
    "with_special_spans": Feature(True),
    "segment_start": Feature(3),
    "thinking_token_budget": Feature(9),
    "reasoning_budget_message": Feature("Enough."),
    "reasoning_budget": Feature(ReasoningBudget(9, [b"<t>"], [b"</t>"], bytes(4), True)),  # masks are the executor's
    "reasoning_control": Feature(True),
}

SWAP = {"num_swap_blocks": 64}
SPECULATION = {"num_speculative_tokens": 3, "max_num_drafts": 16, "adaptive_speculation": False}

SETTINGS = {
    "num_blocks": Feature(50),
    "max_model_len": Feature(128),
    "max_num_seqs": Feature(4),
    "max_num_batched_tokens": Feature(16),
    "max_num_prefill_tokens": Feature(96),
    "block_size": Feature(16),  # the fake executor's
    "prefix_caching": Feature(False),
    "num_swap_blocks": Feature(64, RowFlag.OFFLOAD),
    "kv_offload": Feature(False, settings=SWAP),
    "policy": Feature("longest-prefix-match"),
    "preemption": Feature("recompute", RowFlag.OFFLOAD, settings=SWAP),
    "max_step_s": Feature(0.001),
    "long_prompt_tokens": Feature(8),
    "prompt_max_slowdown": Feature(1.5),
    "encode_max_slowdown": Feature(1.5),
    "long_prompt_max_slowdown": Feature(1.5),
    "hidden_size": Feature(8),
    "kv_groups": Feature((FULL, KVGroup(32)), RowFlag.KV_GROUPS, settings={"num_blocks": 128}),
    "num_speculative_tokens": Feature(3, RowFlag.DRAFTS, settings=SPECULATION),
    "max_num_drafts": Feature(3, RowFlag.DRAFTS, settings=SPECULATION),
    "adaptive_speculation": Feature(False, RowFlag.DRAFTS, settings=SPECULATION),
    "eos_ids": Feature((1, 2)),
    "max_num_top": Feature(5),
    "num_stages": Feature(2, RowFlag.PIPELINED),
    "max_loras": Feature(2),
    "waits_for_adapters": Feature(True, settings={"max_loras": 1}),
    "states": Feature(StateConfig(num_slots=20, decode_interval=16, min_interval=16), RowFlag.STATE),
    "generates": Feature(True),  # else no row decodes: test_encoders.py
    "is_encoder": Feature(False),  # it has a planner of its own
    "block_bytes": Feature(100),
    "slot_bytes": Feature(100),
    "num_encoder_rows": Feature(64),
    "max_whole_run": Feature(40),
    "sleep_cache_bytes": Feature(1000),
}

SCRATCH = {"ahead"}
"""Columns of rows that only the plan which wrote them reads."""


def test_each_option_setting_and_flag_is_decided() -> None:
    assert tuple(OPTIONS) == GenerationOptions.__struct_fields__
    assert tuple(SETTINGS) == SchedulerConfig.__struct_fields__
    assert list(PATHS) == list(RowFlag)
    assert sum(flag for flag, (ahead, _) in PATHS.items() if ahead) == row_flags.AHEAD
    assert sum(flag for flag, (_, runs) in PATHS.items() if runs) == row_flags.DECODE_RUN
    assert not row_flags.DECODE_RUN & ~row_flags.AHEAD, "only a step that is planned ahead is repeated"


def bench_of(settings: dict[str, Any], options: dict[str, Any], depth: int, *, plans_early: bool) -> Bench:
    """Requests that start together. The last one, which has the options, ends last."""
    bench = Bench(config(**settings), depth)
    bench.plans_early = plans_early
    bench.executor.skill = 0.0  # every row has ids left while ids are proposed
    for prompt in PROMPTS[:-1]:
        bench.admit(prompt, max_tokens=NUM_STEPS + 4)
    bench.admit_options(PROMPTS[-1], GenerationOptions(**{"max_tokens": MAX_TOKENS} | options))
    return bench


def run_steps(bench: Bench, num_steps: int) -> list[tuple[bytes, ...]]:
    """Plan steps and settle their results. Returns what they compute."""
    computed: list[tuple[bytes, ...]] = []
    bench.load_adapters()
    while bench.scheduler.load().num_steps < num_steps or bench.steps:
        known = len(bench.steps)
        if bench.scheduler.load().num_steps < num_steps:
            bench.fill()
        computed += [_computed(step) for step in list(bench.steps)[known:]]
        early = bench.num_early_plans
        if bench.scheduler.load().num_steps >= num_steps:
            bench.plans_early, plans = False, bench.plans_early
            bench.answer()
            bench.plans_early = plans
        else:
            bench.answer()
        if bench.num_early_plans > early:
            computed.append(_computed(bench.steps[-1]))
        bench.report()
        bench.check()
    return computed


def _computed(step: m.Step) -> tuple[bytes, ...]:
    arrays = (step.rows, step.starts, step.counts, step.samples, step.drafts, step.drops)
    return tuple(bytes(array) for array in arrays if isinstance(array, bytes))


def columns(rows: RowTracker) -> dict[str, "np.ndarray[Any, Any]"]:
    return {name: value for name, value in vars(rows).items() if isinstance(value, np.ndarray) and name not in SCRATCH}


def check_paths(settings: dict[str, Any], options: dict[str, Any], flags: int, depth: int) -> None:
    """The same steps, columns of rows and outputs as without fast paths, and only the paths that these flags allow."""
    fast, slow = (bench_of(settings, options, depth, plans_early=early) for early in (True, False))
    assert run_steps(fast, NUM_STEPS) == run_steps(slow, NUM_STEPS)
    assert slow.scheduler.rows.all_flags == flags
    for name, column in columns(fast.scheduler.rows).items():
        assert np.array_equal(column, columns(slow.scheduler.rows)[name]), f"{name} differs"
    is_ahead, is_repeated = (all(PATHS[flag][path] for flag in RowFlag if flags & flag) for path in (0, 1))
    assert fast.num_early_plans > NUM_STEPS / 2 or not is_ahead
    assert not any(fast.early_flags & flag for flag, (ahead, _) in PATHS.items() if not ahead)
    assert (fast.num_repeats > 0) == is_repeated
    assert slow.num_early_plans == 0
    for bench in (fast, slow):
        bench.run()
        bench.check()
        if not options.get("use_beam_search"):
            bench.check_outputs()
    for name in ("received", "token_outputs", "prompts", "errors", "finished", "drafts"):
        assert getattr(fast, name) == getattr(slow, name), name
    assert len(fast.finished) == len(fast.opened) and not fast.refused


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name: str, depth: int) -> None:
    feature = OPTIONS[name]
    assert feature.value != getattr(GenerationOptions(), name)
    check_paths(feature.settings, feature.options | {name: feature.value}, feature.flags, depth)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting(name: str, depth: int) -> None:
    feature = SETTINGS[name]
    check_paths(feature.settings | {name: feature.value}, {}, feature.flags, depth)


def _preempt(bench: Bench) -> None:
    bench.scheduler.lifecycle.preempt(int(bench.scheduler.rows.order[-1]))


UNSTEADY: dict[str, tuple[dict[str, Any], Callable[[Bench], object]]] = {
    "a sequence waits for a row": ({"max_num_seqs": 3}, lambda bench: bench.admit(range(9))),
    "a sequence is swapped out": (SWAP | {"kv_offload": False, "preemption": "swap"}, _preempt),
    "a sequence was preempted": ({}, _preempt),
    "a parallel sample waits for the prompt": ({}, lambda bench: bench.admit(range(9), n=2)),
    "a sequence waits for its adapter": (
        {"max_loras": 1, "waits_for_adapters": True},
        lambda bench: bench.admit(range(9), adapter_id="adapter"),
    ),
    "a request is suspected": ({}, lambda bench: bench.admit(range(9), num_crashes=1)),
    "a request is held back": ({}, lambda bench: [bench.admit(range(9), num_crashes=2) for _ in range(9)]),
    "few blocks are free": ({"num_blocks": 6}, lambda bench: None),
}


@pytest.mark.parametrize("state", UNSTEADY)
def test_no_step_is_planned_ahead_while(state: str) -> None:
    settings, begin = UNSTEADY[state]
    bench = bench_of(settings, {}, 1, plans_early=True)
    for _ in range(3):
        bench.fill()
        bench.answer()
    is_steady = bench.scheduler.lifecycle.is_steady
    assert is_steady == (state != "few blocks are free") == (bench.num_early_plans > 0)
    before = bench.num_early_plans
    begin(bench)
    assert not bench.scheduler.lifecycle.is_steady
    bench.fill()
    bench.answer()
    assert bench.num_early_plans == before
    bench.run()
    bench.check_outputs()
    assert set(bench.finished.values()) == {Finish.LENGTH} and len(bench.finished) == len(bench.opened)
