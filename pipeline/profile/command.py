"""`pipeline profile execute`: from options to a report.

This process takes the places of prepare and of the stage, one after the other, so it imports their code by its dotted
name, as a child does.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import topology
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.logs import open_log
from pipeline.profile.options import plan_of
from pipeline.profile.report import as_json, as_tables, console
from pipeline.profile.results import Profile

EXECUTE = "pipeline.stages.execute.profile"
"""Its `profile(settings, plan, prepare)` measures."""
PREPARE_PROGRESS = "pipeline.stages.prepare.progress"


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure and report. Returns 1 where the model can't be run with these settings. Raises ConfigError."""
    plan = plan_of(args)
    if not plan.cases():
        raise ConfigError(["--batch none --prefill none: there is nothing to measure"])
    if args.json and args.json != "-":
        _require_writable(Path(args.json))
    open_log("profile", settings.log_level)
    try:
        profile: Profile = importlib.import_module(EXECUTE).profile(settings, plan, lambda: prepare(settings))
    except UserError as error:
        print(f"pipeline profile: error: {error}", file=sys.stderr)
        return 1
    if args.json == "-":
        sys.stdout.buffer.write(as_json(profile))
        return 0
    screen = console()
    for part in as_tables(profile):
        screen.print(part, markup=False)
    if args.json:
        with _writing(Path(args.json)):
            Path(args.json).write_bytes(as_json(profile))
    return 0


def prepare(settings: Settings) -> Path:
    """The model's folder, made or found as `pipeline serve` does it. Raises UserError."""
    progress = importlib.import_module(PREPARE_PROGRESS).for_stream()
    folder: Path = importlib.import_module(topology.PREPARE).prepare(settings, progress)
    return folder


def _require_writable(path: Path) -> None:
    """Raise ConfigError where the report could not be written, before a minute of measuring is lost."""
    with _writing(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # opening a pipe or a device would be seen at its other end
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"--json {path}: can't be written: {reason}"]) from error
