"""`pipeline check-model`: prepares a checkpoint, computes it on both sides, and prints the comparison.

This process runs the code of prepare and of execute, one after the other, so it imports them by dotted name, as a
stage's process does.
"""

import argparse
import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pipeline import torch_needed
from pipeline.cli.check import fidelity
from pipeline.cli.check.judge import CheckResult, judge
from pipeline.cli.check.options import MAX_TOKENS, MIN_TOKENS
from pipeline.cli.complain import complain
from pipeline.cli.profile.report import console, stack_width
from pipeline.cli.stacked import StackedTable
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import topology
from pipeline.runtime.log.logs import open_log
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import notes_of
from pipeline.supervisor import gpu

EXECUTE = "pipeline.stages.execute.measuring.check"
"""Module with `set_up(settings)`, and `compute(settings, folder, plan)` for our results."""
REFERENCE = "pipeline.stages.prepare.check_model.reference"
"""Module with `Reference`, for transformers' results."""
RANDOM = "pipeline.stages.prepare.check_model.random_checkpoint"
PREPARE_PROGRESS = "pipeline.stages.prepare.progress"

PASSED, FAILED = 0, 1


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Check and report. Returns 1 if a check fails or the model can't run. Raises ConfigError."""
    fidelity.check_options(args, settings)
    if not MIN_TOKENS <= args.tokens <= MAX_TOKENS:
        raise ConfigError([f"--tokens {args.tokens}: needs a number from {MIN_TOKENS} to {MAX_TOKENS}"])
    open_log("check-model", settings.log_level)
    try:
        if (problem := gpu.why_none(settings)) is not None:
            raise UserError(problem)
        torch_needed.require("check-model", settings.execute.device)
        importlib.import_module(EXECUTE).set_up(settings)
        if args.fidelity:
            return _measure(args, settings)
        with _checkpoint(args, settings) as (for_prepare, for_execute):
            model, notes, windows, findings = _check(for_prepare, for_execute, args.tokens)
    except UserError as error:
        complain("pipeline check-model", error)
        return FAILED
    screen = console()
    screen.print(f"{args.checkpoint}: {model}", markup=False, soft_wrap=True)
    for note in notes:
        screen.print(note, markup=False, soft_wrap=True)
    for table in table_of(findings).tables(stack_width(screen)):
        screen.print(table, markup=False)
    for line in windows:
        complain("pipeline", line, "warning")
    failed = [finding for finding in findings if not finding.passed]
    screen.print(
        f"failed: {len(failed)} of {len(findings)} checks" if failed else f"passed: {len(findings)} checks",
        markup=False,
    )
    return FAILED if failed else PASSED


def _measure(args: argparse.Namespace, settings: Settings) -> int:
    """Measure with --fidelity, and report. Raises UserError."""
    folder, parts = fidelity.report(args, settings)
    screen = console()
    screen.print(f"{args.checkpoint}: {_summary(ModelConfig.load(folder))}", markup=False, soft_wrap=True)
    for note in notes_of(folder):
        screen.print(note, markup=False, soft_wrap=True)
    for part in parts:
        screen.print(part, markup=False, soft_wrap=isinstance(part, str))
    return PASSED


@contextmanager
def _checkpoint(args: argparse.Namespace, settings: Settings) -> Iterator[tuple[Settings, Settings]]:
    """The settings for prepare and for execute, with the checkpoint as `model`. A generated checkpoint and its prepared
    folder are temporary."""
    settings = msgspec.structs.replace(settings, model=args.checkpoint, quantization="none")
    path = Path(args.checkpoint)
    if path.suffix != ".json":
        yield settings, settings
        return
    with tempfile.TemporaryDirectory(prefix="check-model-") as folder:
        made = Path(folder) / "tiny"
        made.mkdir()
        importlib.import_module(RANDOM).make(path, made, args.seed)
        settings = msgspec.structs.replace(settings, model=str(made))
        # Compiled kernels stay in their usual cache.
        yield msgspec.structs.replace(settings, cache_dir=str(Path(folder) / "cache")), settings


def _check(
    for_prepare: Settings, for_execute: Settings, num_tokens: int
) -> tuple[str, list[str], list[str], list[CheckResult]]:
    """A summary of the model, which rules applied where its files disagree and what is compared, warnings about what
    was not checked, and the findings. Raises UserError."""
    prepare: Any = importlib.import_module(topology.PREPARE)
    reference_module: Any = importlib.import_module(REFERENCE)
    source = reference_module.checkpoint(for_prepare)
    folder = prepare.prepare(for_prepare, importlib.import_module(PREPARE_PROGRESS).for_stream())
    notes = [*notes_of(folder), *reference_module.how_compared(source, folder, num_tokens)]
    plan = reference_module.plan_of(folder, num_tokens)
    sides = list(importlib.import_module(EXECUTE).compute(for_execute, folder, plan))
    reference = reference_module.Reference(source, for_prepare.hf_overrides, folder)
    findings = [finding for ours in sides for finding in judge(plan, ours, reference.compute(plan, ours))]
    config = ModelConfig.load(folder)
    return _summary(config), notes, _unseen(config, num_tokens), findings


def _summary(config: ModelConfig) -> str:
    windows = "" if config.sliding_window is None else f", window {config.sliding_window}"
    if config.sliding_layers is not None:
        windows += f" in {len(config.sliding_layers)} of them"
    return (
        f"{config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size}, {config.num_heads} "
        f"heads on {config.num_kv_heads} of size {config.head_dim}, vocabulary of {config.vocab_size}{windows}"
    )


def _unseen(config: ModelConfig, num_tokens: int) -> list[str]:
    if config.sliding_window is None or config.sliding_window < num_tokens:
        return []
    return [
        f"the sliding window of {config.sliding_window} is longer than every prompt, so that it was not checked: "
        f"--tokens {config.sliding_window + 64} would"
    ]


def table_of(findings: list[CheckResult]) -> StackedTable:
    headings = (
        "program",
        "computed",
        "logits of",
        "difference",
        "allowed",
        "worst row",
        "allowed",
        "same text",
        "result",
    )
    table = StackedTable(headings, num_keys=2, left=("result",))
    for finding in findings:
        table.add_row(
            finding.program,
            finding.way,
            f"{finding.num_rows} ids",
            _amount(finding.difference, finding),
            _amount(finding.allowed, finding),
            _amount(finding.worst, finding),
            _amount(finding.allowed_worst, finding),
            _texts(finding),
            "pass" if finding.passed else "FAIL",
        )
    return table


def _texts(finding: CheckResult) -> str:
    if not finding.num_texts:
        return "–"
    undecided = f", {finding.num_undecided} undecided" if finding.num_undecided else ""
    return f"{finding.num_same} of {finding.num_texts}{undecided}"


def _amount(value: float, finding: CheckResult) -> str:
    return f"{value:.2%}" if finding.is_share else f"{value:.1e}"
