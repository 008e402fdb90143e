"""Runs each section in its own process, so that a GPU error or a hanging item ends only that process."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from pipeline.cli.out_file import write_output
from tools.gpu_check import child, report
from tools.gpu_check.child import GPU_BROKEN, Task
from tools.gpu_check.options import ALL, SECTIONS, TOTAL_S, parser
from tools.gpu_check.readings import Ended, FailedItem, Line, Reading, Started, read, write

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_S = 0.1
SAVE_S = 10.0
"""The files in --out are written so often."""
KILL_TIMEOUT_S = 10.0
"""Longest wait for a killed process."""
UNREAPED: list["subprocess.Popen[bytes]"] = []
"""Killed processes that had not ended after `KILL_TIMEOUT_S`."""
NO_GPU = 2
STOPPED = threading.Event()
"""Set by SIGTERM. No further task starts, and the results so far are reported."""
QUICK_SHARE = 0.5
"""Part of a section's time limit that --quick allows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested sections. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.child:
        return child.run(Task(**json.loads(args.child)))
    if args.interpret:
        # Set before the import of Triton below.
        os.environ["TRITON_INTERPRET"] = "1"
    elif problem := _why_not_here():
        print(f"gpu_check: {problem}", file=sys.stderr)
        return NO_GPU
    names = list(args.only or SECTIONS)
    if args.tune and "tune" not in names:
        names.append("tune")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    found = report.Results([], [], args.interpret)
    before = signal.signal(signal.SIGTERM, lambda *_: STOPPED.set()) if not args.inline else None
    try:
        for lines in _run_all(args, names):
            failed = [line for line in lines if isinstance(line, FailedItem)]
            found = report.Results([line for line in lines if isinstance(line, Reading)], failed, args.interpret)
            if args.out is not None:
                # Written while sections run, so that the results survive if this program is killed.
                write_output(args.out / "found.json", report.as_json(found))
                write_output(args.out / "found.md", report.as_markdown(found))
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    print(f"\n{report.as_text(found)}", flush=True)
    if args.out is not None:
        print(f"\nwritten: {args.out / 'found.json'}, {args.out / 'found.md'}")
    return 1 if found.is_wrong else 0


def _why_not_here() -> str | None:
    """Why the check can't run on this machine; None if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch can't be imported: {error}"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU (--interpret runs the code on the CPU)"
    return None


def _run_all(args: argparse.Namespace, names: Sequence[str]) -> Iterator[list[Line]]:
    """Yield all lines of all sections so far, every `SAVE_S` and after each turn. Sections that don't measure time run
    first and in parallel."""
    lines: dict[str, list[Line]] = {}
    rates: dict[str, float] = {}
    end_s = time.monotonic() + TOTAL_S
    together = [name for name in names if not ALL[name].is_alone]
    if not args.inline and "speed" in names:
        together.append("warm-up")
    turns = [together] if together and not args.inline else [[name] for name in together]
    for name in names:
        if ALL[name].is_alone:
            turns += [["tune-compile"], [name]] if name == "tune" else [[name]]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for turn in turns:
            began_s = time.monotonic()
            tasks = [task for name in turn for task in _tasks(args, name, end_s - began_s, Path(folder), rates)]
            order = (*names, "warm-up", "tune-compile")
            with ThreadPoolExecutor(len(tasks)) as pool:
                running = [pool.submit(_run_section, task, args.inline) for task in tasks]
                while wait(running, SAVE_S).not_done:
                    now = [line for task in tasks for line in read(Path(task.lines))]
                    yield [*(line for name in order for line in lines.get(name, [])), *now]
                found = [future.result() for future in running]
            for task, each in zip(tasks, found, strict=True):
                lines.setdefault(task.section, []).extend(each)
                rates |= {
                    line.case: line.value for line in each if isinstance(line, Reading) and line.value is not None
                }
            print(f"{', '.join(turn)}: {time.monotonic() - began_s:.1f} s", flush=True)
            yield [line for name in order for line in lines.get(name, [])]


def _tasks(args: argparse.Namespace, name: str, left_s: float, folder: Path, rates: dict[str, float]) -> Iterator[Task]:
    """The tasks of a section, one for each process."""
    section = ALL[name]
    budget_s = section.budget_s * (QUICK_SHARE if args.quick and section.is_alone else 1.0)
    if not name.startswith("tune"):
        budget_s = max(0.0, min(budget_s, left_s))
    print(f"{name}: {section.what}, at most {budget_s:.0f} s", flush=True)
    num_processes = 1 if args.inline or args.interpret else section.num_processes
    for process in range(num_processes):
        yield Task(
            section=name,
            lines=str(folder / f"{name}-{process}.jsonl"),
            left_s=budget_s,
            interpreted=args.interpret,
            quick=args.quick,
            model=str(args.model.resolve()) if args.model else None,
            out=str(args.out.resolve()) if args.out else None,
            process=process,
            num_processes=num_processes,
            rates=rates,
        )


def _run_section(task: Task, inline: bool) -> list[Line]:
    """Run a task and return its lines. If its process dies, a new one runs the remaining items."""
    path = Path(task.lines)
    end_s = time.monotonic() + task.left_s
    while True:
        done = [line.item for line in read(path) if isinstance(line, Started)]
        left_s = 0.0 if STOPPED.is_set() else end_s - time.monotonic()
        if left_s <= 0 and (not task.interpreted or STOPPED.is_set()):
            write(path, Reading("the rest", result="cut", note="the section ran out of time", section=task.section))
            return read(path)
        task = Task(**{**json.loads(task.to_json()), "done": done, "left_s": left_s})
        code = child.run(task) if inline else _run_process(task, end_s)
        lines = read(path)
        begun = [line.item for line in lines if isinstance(line, Started)]
        closed = {line.item for line in lines if isinstance(line, Ended | FailedItem)}
        opened = [item for item in begun if item not in closed]
        for item in opened:
            write(path, FailedItem(item, f"the process ended with {_reason(code)} in {item!r}"))
        if code == 0:
            return read(path)
        if len(begun) == len(done):
            # The process died before its first item, and the next one would too.
            if code != GPU_BROKEN:
                write(path, FailedItem(task.section, f"the process ended with {_reason(code)} before its first item"))
            return read(path)
        print(f"    {task.section} continues in a new process after {_reason(code)}", flush=True)


def _run_process(task: Task, end_s: float) -> int:
    """Run a task's process until it ends or exceeds a limit. Returns its exit code, negative for a signal."""
    environ = dict(os.environ)
    if not ALL[task.section].is_alone:
        # There is one process per core: more threads would only spin.
        environ["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        command_of(task), cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )
    path = Path(task.lines)
    seen, item_end_s, item = 0, end_s, task.section
    try:
        while (code := process.poll()) is None:
            lines = read(path)
            for line in lines[seen:]:
                if isinstance(line, Started):
                    item, item_end_s = line.item, time.monotonic() + line.limit_s
            seen = len(lines)
            if STOPPED.is_set():
                write(path, FailedItem(item, f"{item!r} was killed because gpu_check was stopped"))
                return -signal.SIGKILL
            now_s = time.monotonic()
            if now_s > min(end_s, item_end_s) and not task.interpreted:
                limit = "its time limit" if now_s > item_end_s else "the section's time limit"
                write(path, FailedItem(item, f"{item!r} was killed: it exceeded {limit}"))
                return -signal.SIGKILL
            time.sleep(POLL_S)
        return code
    finally:
        _kill_session(process.pid)
        try:
            process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # A process in the driver may take long to die, or never die. The next tasks run beside it.
            UNREAPED.append(process)


def _kill_session(leader: int) -> None:
    """Kill a process and everything it started, including servers in process groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def command_of(task: Task) -> list[str]:
    """The command that runs a task in its own process."""
    return [sys.executable, "-m", "tools.gpu_check", "--child", task.to_json()]


def _reason(code: int) -> str:
    if code == GPU_BROKEN:
        return "a GPU error"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
