"""Sections, each in a process of its own: an error of the GPU's ends a process, and so does an item that never ends."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tools.gpu_check import child, report
from tools.gpu_check.child import BROKEN, Task
from tools.gpu_check.options import ALL, SECTIONS, TOTAL_S, parser
from tools.gpu_check.readings import Begun, Ended, FailedItem, Line, Reading, read, write

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_S = 0.1
KILLED_S = 10.0
"""Longest wait for a process that was killed."""
LEFT: list["subprocess.Popen[bytes]"] = []
"""Those that had not ended by then."""
NO_GPU = 2
STOPPED = threading.Event()
"""Someone ends this program: nothing more is begun, and what there is is told."""
QUICK_SHARE = 0.5
"""Of a section's time, with --quick."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.child:
        return child.run(Task(**json.loads(args.child)))
    if args.interpret:
        # Read when Triton is loaded, which is below.
        os.environ["TRITON_INTERPRET"] = "1"
    elif problem := _no_gpu():
        print(f"gpu_check: {problem}", file=sys.stderr)
        return NO_GPU
    names = list(args.only or SECTIONS)
    if args.tune and "tune" not in names:
        names.append("tune")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    found = report.Found([], [], args.interpret)
    before = signal.signal(signal.SIGTERM, lambda *_: STOPPED.set()) if not args.inline else None
    try:
        for lines in _run_all(args, names):
            failed = [line for line in lines if isinstance(line, FailedItem)]
            found = report.Found([line for line in lines if isinstance(line, Reading)], failed, args.interpret)
            if args.out is not None:
                # After each turn: whoever ends this program has what there is.
                (args.out / "found.json").write_text(report.as_json(found))
                (args.out / "found.md").write_text(report.as_markdown(found))
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    print(f"\n{report.as_text(found)}", flush=True)
    if args.out is not None:
        print(f"\nwritten: {args.out / 'found.json'}, {args.out / 'found.md'}")
    return 1 if found.is_wrong else 0


def _no_gpu() -> str | None:
    """Why nothing can be done here, in a line."""
    try:
        import torch
    except ImportError as error:
        return f"torch is not there: {error}"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that torch can use is here (--interpret tries the code on the CPU)"
    return None


def _run_all(args: argparse.Namespace, names: Sequence[str]) -> Iterator[list[Line]]:
    """Every line of every section until now, after each turn. Sections that measure no time come first, all at once."""
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
            with ThreadPoolExecutor(len(tasks)) as pool:
                found = list(pool.map(lambda task: _run_section(task, args.inline), tasks))
            for task, each in zip(tasks, found, strict=True):
                lines.setdefault(task.section, []).extend(each)
                rates |= {
                    line.case: line.value for line in each if isinstance(line, Reading) and line.value is not None
                }
            print(f"{', '.join(turn)}: {time.monotonic() - began_s:.1f} s", flush=True)
            yield [line for name in (*names, "warm-up", "tune-compile") for line in lines.get(name, [])]


def _tasks(args: argparse.Namespace, name: str, left_s: float, folder: Path, rates: dict[str, float]) -> Iterator[Task]:
    """Those of a section."""
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
    """The section's lines. A process that breaks is followed by another for what it left."""
    path = Path(task.lines)
    end_s = time.monotonic() + task.left_s
    while True:
        done = [line.item for line in read(path) if isinstance(line, Begun)]
        left_s = 0.0 if STOPPED.is_set() else end_s - time.monotonic()
        if left_s <= 0 and (not task.interpreted or STOPPED.is_set()):
            write(path, Reading("the rest", result="cut", note="the section's time was over", section=task.section))
            return read(path)
        task = Task(**{**json.loads(task.to_json()), "done": done, "left_s": left_s})
        code = child.run(task) if inline else _run_process(task, end_s)
        lines = read(path)
        begun = [line.item for line in lines if isinstance(line, Begun)]
        closed = {line.item for line in lines if isinstance(line, Ended | FailedItem)}
        opened = [item for item in begun if item not in closed]
        for item in opened:
            write(path, FailedItem(item, f"the process ended by {_reason(code)} in {item!r}"))
        if code == 0:
            return read(path)
        if len(begun) == len(done):
            # It did not come so far as to begin anything: the next would not either.
            if code != BROKEN:
                write(path, FailedItem(task.section, f"the process ended by {_reason(code)} before its first item"))
            return read(path)
        print(f"    {task.section} goes on in a new process after {_reason(code)}", flush=True)


def _run_process(task: Task, end_s: float) -> int:
    """Run a section's process until it ends or has to be ended. Returns its exit code, as subprocess has it."""
    environ = dict(os.environ)
    if not ALL[task.section].is_alone:
        # Beside as many processes as there are cores, threads of one would wait for cores, and spin.
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
                if isinstance(line, Begun):
                    item, item_end_s = line.item, time.monotonic() + line.limit_s
            seen = len(lines)
            if STOPPED.is_set():
                write(path, FailedItem(item, f"{item!r} was ended with this program"))
                return -signal.SIGKILL
            now_s = time.monotonic()
            if now_s > min(end_s, item_end_s) and not task.interpreted:
                why = "its time" if now_s > item_end_s else "the section's time"
                write(path, FailedItem(item, f"{item!r} was ended: {why} was over"))
                return -signal.SIGKILL
            time.sleep(POLL_S)
        return code
    finally:
        _kill_session(process.pid)
        try:
            process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            # One that is inside of the driver may take its time, or never end: what follows goes on beside it.
            LEFT.append(process)


def _kill_session(leader: int) -> None:
    """End a process and all that it has started, a server in a process group of its own among them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def command_of(task: Task) -> list[str]:
    """What runs a section in a process of its own."""
    return [sys.executable, "-m", "tools.gpu_check", "--child", task.to_json()]


def _reason(code: int) -> str:
    if code == BROKEN:
        return "an error of the GPU's"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
