"""`pipeline profile gateway`, `ingest`, `schedule` and `detokenize`: run the measurement and print the report."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.cli.complain import complain
from pipeline.cli.json_output import require_json_writable, write_json
from pipeline.cli.out_file import require_writable
from pipeline.cli.profile.alone.measure import measure
from pipeline.cli.profile.alone.result import as_table
from pipeline.cli.profile.command import prepare
from pipeline.cli.profile.report import console
from pipeline.cli.safe_console import SafeConsole
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.log.logs import open_log

Tell = Callable[[str, float], None]


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Measure and report. Returns 1 if the stage fails. Raises ConfigError."""
    require_json_writable(args.json)
    for option, path in {"--flame": args.flame, "--trace": args.trace}.items():
        if path is not None:
            require_writable(path, option)
    open_log("profile", "warning")
    try:
        folder = prepare(settings)
        with progress_of(args.stage) as tell:
            result = measure(
                args.stage,
                msgspec.structs.replace(settings, log_level="warning"),
                folder,
                num_streams=args.streams,
                seconds=args.seconds,
                warmup_s=args.warmup,
                progress=tell,
                flame=args.flame,
                trace=args.trace,
            )
    except UserError as error:
        complain("pipeline profile", error)
        return 1
    screen = console()

    def show() -> None:
        for part in as_table(result):
            screen.print(part, markup=False)

    write_json(args.json, result, show)
    return 0


@contextmanager
def progress_of(what: str) -> Iterator[Tell]:
    """A progress bar in a terminal, nothing elsewhere."""
    screen = SafeConsole(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=1.0)
        yield lambda text, share: bar.update(task, description=f"{what}: {text}", completed=share)
