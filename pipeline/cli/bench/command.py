"""`pipeline bench`: runs the measurement and prints the report."""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.cli.bench import words
from pipeline.cli.bench.client import ADAPTERS, AUTO, BenchClient, RequestResult, ServerError, open_session
from pipeline.cli.bench.loop import ClosedLoop, Level, LoadPlan
from pipeline.cli.bench.measure import Summary, summarize
from pipeline.cli.bench.open_loop import OpenLoop, OpenLoopPlan
from pipeline.cli.bench.options import Length, Workload, given_options, workload_of
from pipeline.cli.bench.plot.results import NamedResult, chart_of, read_results
from pipeline.cli.bench.report import TABLE_WIDTH, BenchReport, as_text, console
from pipeline.cli.bench.tally import Tally
from pipeline.cli.bench.tasks import prompt_of
from pipeline.cli.complain import complain
from pipeline.cli.json_output import require_json_writable, write_json
from pipeline.cli.out_file import require_writable, write_output, writing
from pipeline.config.load import ConfigError
from pipeline.runtime.security.api_keys import keep_out_of_core_dumps, of_client
from pipeline.version import VERSION

REFRESH_S = 0.5
"""Seconds between updates of the progress bar, which takes CPU time from the server."""

BAR_WIDTH = 12
"""Characters: the line fits into 80 columns."""
INTERRUPTED = 130
"""The exit code after Ctrl-C."""

CALIBRATION_WORDS = (16, 116)
STREAM_WORDS, STREAM_TOKENS = 64, 1024
"""Prompt and output of a stream that runs beside requests that arrive."""


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns 1 if a request failed or the server can't be used. Raises ConfigError."""
    if args.results:
        return _draw(args)
    workload = workload_of(args)
    _check(workload)
    require_json_writable(args.json)
    if args.plot:
        require_writable(Path(args.plot), "--plot")
    measured = Measured()
    code = 0
    try:
        _run_loop(_measure(args, workload, measured))
    except ServerError as error:
        complain("pipeline bench", error)
        code = 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code and not measured.levels:
        return code
    levels = measured.levels
    if code:
        of = len(workload.concurrencies) * len(workload.temperatures)
        complain("pipeline bench", f"{len(levels)} of {of} levels were measured; this is their report", "warning")
    report = BenchReport(args.url, measured.model, VERSION, workload, levels, is_complete=code == 0)
    screen = console(TABLE_WIDTH)
    write_json(args.json, report, lambda: screen.print(as_text(report, screen.width)))
    if args.plot:
        _write_chart(args.plot, [NamedResult(report.model, report)])
    for level in report.levels:
        for reason, count in level.errors.items():
            where = f"{level.concurrency} streams, temperature {level.temperature:g}"
            complain("pipeline bench", f"{where}: {count} × {reason}")
    return code or int(any(level.num_errors for level in report.levels))


def _draw(args: argparse.Namespace) -> int:
    """Draw results of earlier runs. Raises ConfigError."""
    if not args.plot:
        raise ConfigError(["RESULT.json: needs --plot FILE.svg, which draws it"])
    if set(given_options(args)) - {"plot", "results"}:
        raise ConfigError(["RESULT.json: nothing is measured, so the only other option is --plot; remove the others"])
    results = read_results(args.results)
    require_writable(Path(args.plot), "--plot")
    _write_chart(args.plot, results)
    return 0


def _write_chart(path: str, results: Sequence[NamedResult]) -> None:
    with writing(Path(path), "--plot"):
        write_output(Path(path), chart_of(results).as_svg())


def _check(workload: Workload) -> None:
    """Raise ConfigError if the shared prefix is longer than the prompt, or if prompts of a task have one."""
    prompt, shared, arrivals = workload.prompt, workload.shared_prefix, workload.arrivals
    if arrivals is not None and arrivals.request_rate == inf and workload.num_requests is None:
        raise ConfigError(["--request-rate inf: all requests arrive at once; --num-requests says how many"])
    if workload.task is not None and shared.count:
        raise ConfigError([f"--task {workload.task}: its prompts share no prefix"])
    if shared.count and shared.unit == prompt.unit and shared.count >= prompt.count:
        raise ConfigError(
            [f"--shared-prefix-{shared.unit} {shared.count}: needs less than the prompt's {prompt.count}"]
        )


@dataclass
class Measured:
    """What has been measured so far: an interrupt or a server that dies ends a run, and this stays."""

    model: str = ""
    levels: list[Summary] = field(default_factory=list)


def _run_loop(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _measure(args: argparse.Namespace, workload: Workload, measured: Measured) -> None:
    if key := of_client(args.api_key):
        keep_out_of_core_dumps()
    async with open_session(key, args.timeout) as session:
        client = BenchClient(session, args.url, args.model, workload.endpoint)
        if client.model in (AUTO, ADAPTERS):
            await client.find_model()
        calibration = await _calibrate(client, workload)
        num_words = _num_words(workload.prompt, calibration)
        num_shared = min(_num_words(workload.shared_prefix, calibration), num_words - 1)
        measured.model = client.model
        with _Bar(len(workload.concurrencies) * len(workload.temperatures)) as bar:
            for concurrency in workload.concurrencies:
                for temperature in workload.temperatures:
                    level = await _level(client, workload, concurrency, temperature, (num_words, num_shared), bar)
                    measured.levels.append(summarize(level, temperature))


async def _calibrate(client: BenchClient, workload: Workload) -> words.Calibration | None:
    """The server's tokens per word; None if all lengths are in words."""
    if workload.task is not None or all(
        length.unit == "words" or length.count == 0 for length in (workload.prompt, workload.shared_prefix)
    ):
        return None
    tokens = [
        await client.count_tokens(words.text(f"{workload.seed}/calibration", count), {"temperature": 0})
        for count in CALIBRATION_WORDS
    ]
    return words.Calibration.between(CALIBRATION_WORDS, (tokens[0], tokens[1]))


def _num_words(length: Length, calibration: words.Calibration | None) -> int:
    if length.unit == "words" or length.count == 0:
        return length.count
    if calibration is None:  # a task's prompts have their own length
        return length.count
    return calibration.words_for(length.count)


async def _level(
    client: BenchClient,
    workload: Workload,
    concurrency: int,
    temperature: float,
    lengths: tuple[int, int],
    bar: "_Bar",
) -> Level:
    options: dict[str, Any] = {"temperature": temperature}
    if workload.ignore_eos:
        options["ignore_eos"] = True
    if workload.beam_width:
        options |= {"use_beam_search": True, "n": workload.beam_width}

    async def generate(name: str, part: float) -> RequestResult:
        # Prompts differ between temperatures, so that no level finds another's in the prefix cache.
        seed = f"{concurrency}/{temperature:g}/{name}"
        if workload.task is None:
            prompt = words.prompt(workload.seed, seed, *lengths)
        else:
            prompt = prompt_of(workload.task, f"{workload.seed}/{seed}")
        length = {"max_tokens": max(1, round(part * workload.output_tokens))}
        if workload.ignore_eos and not workload.beam_width:
            # Else a model that wants to end goes on with special tokens, which have no text: their chunks are missing,
            # and the gaps beside them count as long ones. llama.cpp's server never samples them with `ignore_eos`.
            length["min_tokens"] = length["max_tokens"]
        return await client.generate(prompt, options | length)

    async def generate_warmup(name: str, part: float) -> RequestResult:
        result = await generate(name, part)
        if result.is_refused:
            raise ServerError(f"{client.url} answered {result.error}")
        return result

    async def stream(name: str, part: float, tally: Tally, started: Callable[[], None]) -> RequestResult:
        prompt = words.prompt(workload.seed, f"{concurrency}/{temperature:g}/{name}", STREAM_WORDS, 0)
        num_tokens = round(part * STREAM_TOKENS)
        length = {"max_tokens": num_tokens, "temperature": temperature}
        if workload.ignore_eos:
            length |= {"ignore_eos": True, "min_tokens": num_tokens}
        return await client.generate(prompt, length, tally, started)

    bar.next(f"{concurrency} streams, temperature {temperature:g}")
    duration_s, num_requests, num_warmups = workload.duration_s, workload.num_requests, workload.num_warmups
    loop: ClosedLoop | OpenLoop
    if workload.arrivals is None:
        closed = LoadPlan(concurrency, duration_s, num_requests, num_warmups)
        loop = ClosedLoop(closed, generate, bar.update, generate_warmup)
    else:
        seed = f"{workload.seed}/{concurrency}/{temperature:g}/arrivals"
        plan = OpenLoopPlan(workload.arrivals, concurrency, duration_s, seed, num_requests, num_warmups)
        loop = OpenLoop(plan, generate, stream, lambda: Tally(workload.endpoint), bar.update, generate_warmup)
    try:
        return await loop.run()
    except* ServerError as errors:
        raise errors.exceptions[0] from None  # each stream has the same


class _Bar:
    """The progress of all levels on standard error, if that is a terminal."""

    def __init__(self, num_levels: int, screen: Console | None = None) -> None:
        screen = screen or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[left]}"))
        self._progress = Progress(*columns, console=screen, auto_refresh=False, transient=True)
        self._progress.disable = not screen.is_terminal
        self._num_levels, self._level = num_levels, 0
        self._task = self._progress.add_task("", total=1.0, left="")
        self._begun_s = self._drawn_s = perf_counter()

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def next(self, description: str) -> None:
        self._level += 1
        self._draw(f"{self._level}/{self._num_levels}: {description}", 0.0)

    def update(self, loop: ClosedLoop | OpenLoop) -> None:
        if perf_counter() - self._drawn_s >= REFRESH_S:
            self._draw(None, loop.done)

    def _draw(self, description: str | None, done_of_level: float) -> None:
        """`done_of_level` is a share, 0 to 1."""
        self._drawn_s = perf_counter()
        share = (self._level - 1 + done_of_level) / self._num_levels
        left = left_words(share, self._drawn_s - self._begun_s)
        self._progress.update(self._task, description=description, completed=share, left=left, refresh=True)


def left_words(share: float, elapsed_s: float) -> str:
    """The finished share of a run, and the time that the rest takes at the same rate."""
    if share <= 0:
        return ""
    left_s = elapsed_s * (1 - share) / share
    left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
    return f"{share:.0%}, about {left} left"
