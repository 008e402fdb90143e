"""`pipeline profile execute`: runs the measurement and prints the report.

This process runs the code of prepare and of the stage, one after the other, so it imports them by dotted name, as a
stage's process does.
"""

import argparse
import importlib
from pathlib import Path

from pipeline import torch_needed
from pipeline.cli.complain import complain
from pipeline.cli.json_output import require_json_writable, write_json
from pipeline.cli.profile.options import plan_of
from pipeline.cli.profile.report import as_tables, console, stack_width
from pipeline.cli.profile.results import Profile, ProfilePlan
from pipeline.cli.profile.shapes import SHAPES
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import topology
from pipeline.runtime.log.logs import open_log
from pipeline.supervisor import gpu

EXECUTE = "pipeline.stages.execute.measuring.profile"
"""Module whose `profile(settings, plan, prepare)` measures."""
PREPARE_PROGRESS = "pipeline.stages.prepare.progress"


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure and report. Returns 1 if the model can't run with these settings. Raises ConfigError."""
    plan = plan_of(args)
    if not plan.cases():
        raise ConfigError(["--batch none --prefill none: there is nothing to measure"])
    if plan.against and settings.execute.device == "cuda":
        raise ConfigError(
            [f"--against {plan.against}: it computes on a CPU, and execute.device is 'cuda': leave it out"]
        )
    if plan.layers is not None:
        _check_layers(plan)
    require_json_writable(args.json)
    open_log("profile", settings.log_level)
    try:
        if (problem := gpu.why_none(settings) or torch_needed.why_missing(settings)) is not None:
            raise UserError(problem)
        if plan.shape or plan.against:
            torch_needed.require("--shape" if plan.shape else f"--against {plan.against}")
        profile: Profile = importlib.import_module(EXECUTE).profile(settings, plan, lambda: prepare(settings))
    except UserError as error:
        complain("pipeline profile", error)
        return 1
    screen = console()

    def show() -> None:
        for part in as_tables(profile, stack_width(screen)):
            screen.print(part, markup=False)

    write_json(args.json, profile, show)
    return 0


def _check_layers(plan: ProfilePlan) -> None:
    if plan.shape is None:
        raise ConfigError([f"--layers {plan.layers}: it needs --shape: a model is measured with all its layers"])
    most = SHAPES[plan.shape].num_layers
    if plan.layers is not None and plan.layers > most:
        raise ConfigError([f"--layers {plan.layers}: {plan.shape} has only {most}"])


def prepare(settings: Settings) -> Path:
    """The prepared folder of the model, as in `pipeline serve`. Raises UserError."""
    progress = importlib.import_module(PREPARE_PROGRESS).for_stream()
    folder: Path = importlib.import_module(topology.PREPARE).prepare(settings, progress)
    return folder
