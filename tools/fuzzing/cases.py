"""What fuzzers of files share: their options, the loop over their cases, and the wait for a case's process."""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def arguments(doc: str | None, memory_mib: int, timeout_s: float) -> argparse.Namespace:
    """The command's options, of which the limits of a case have these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--only", type=int, help="run a single case")
    parser.add_argument(
        "--memory-mib", type=int, default=memory_mib, help=f"memory limit of a case (default: {memory_mib})"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=timeout_s, help=f"time limit of a case (default: {timeout_s:g})"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="where failed cases are kept")
    return parser.parse_args()


def run_cases(
    args: argparse.Namespace,
    run_case: Callable[[int], tuple[str, str]],
    keep: Callable[[int, Path], None],
    report_every: int,
) -> int:
    """Run the cases and print what fails; the exit code. `run_case` returns "accepted", "refused" or "failed", and why;
    `keep` writes the input of a failed case to a path in the folder of `--out`."""
    counts: Counter[str] = Counter()
    for number in range(args.cases) if args.only is None else [args.only]:
        result, words = run_case(number)
        counts[result] += 1
        if result == "failed":
            print(f"case {number} of seed {args.seed} failed: {words}", flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            keep(number, args.out / f"{args.seed}-{number}")
        elif args.only is not None:
            print(f"{result}: {words}")
        if (number + 1) % report_every == 0:
            print(f"{number + 1} cases: {_described(counts)}", flush=True)
    print(f"done, {sum(counts.values())} cases: {_described(counts)}")
    return 1 if counts["failed"] else 0


def _described(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[result]} {result}" for result in ("accepted", "refused", "failed"))


def wait(pid: int, timeout_s: float) -> int | None:
    """The exit code of a child, negative for a signal; None if it had to be killed."""
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
