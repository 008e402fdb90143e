"""The command."""

import argparse
import sys
import time
from collections import Counter

from tools.scaling_meter.case import Case
from tools.scaling_meter.measure import Result, measure
from tools.scaling_meter.table import all_cases

WIDTH = 79
HEADER = f"{'case':<45} {'bytes':>9} {'ms':>7} {'growth':>6}  result"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.scaling_meter", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--max-bytes", type=int, help="no larger inputs")
    parser.add_argument("--every", type=int, default=1, help="only every Nth case")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--all", action="store_true", help="also print the rows of cases that pass")
    options = parser.parse_args(args)
    cases = [case for case in all_cases() if options.only in case.title][:: options.every]
    if options.list:
        print(*(case.title for case in cases), sep="\n")
        return 0
    return report(cases, options.max_bytes, with_all=options.all)


def report(cases: list[Case], max_n: int | None = None, *, with_all: bool = False) -> int:
    """Measure cases and print a table. Returns 1 if any fails."""
    if not cases:
        print("no case has such a name")
        return 2
    begin_s = time.monotonic()
    print(HEADER)
    failures: list[Result] = []
    slowest: dict[str, Result] = {}
    for number, case in enumerate(cases):
        _progress(number, len(cases), time.monotonic() - begin_s, case.title)
        result = measure(case, max_n)
        if result.problem:
            failures.append(result)
        group = slowest.get(case.group)
        if group is None or result.samples[-1].cpu_s > group.samples[-1].cpu_s:
            slowest[case.group] = result
        if result.problem or with_all:
            _progress_over()
            print(_row(result))
    _progress_over()
    print("\nslowest case of each group")
    for result in slowest.values():
        print(_row(result))
    counts = Counter(result.case.group for result in failures)
    took_s = time.monotonic() - begin_s
    print(f"\n{len(cases)} cases in {took_s:.0f} s, {len(failures)} fail{''.join(map(_count, counts.items()))}")
    return 1 if failures else 0


def _row(result: Result) -> str:
    last, growth = result.samples[-1], result.growth
    shown = "-" if growth is None else f"{growth:.2f}"
    row = f"{result.case.title[:45]:<45} {last.n:>9} {last.cpu_s * 1000:>7.1f} {shown:>6}  "
    return row + ("ok" if not result.problem else f"FAILS\n    {result.problem[: WIDTH - 4]}")


def _count(item: tuple[str, int]) -> str:
    return f"\n    {item[1]:>5} of {item[0]}"


def _progress(number: int, total: int, took_s: float, title: str) -> None:
    if sys.stderr.isatty():
        left = f", {took_s / number * (total - number):.0f} s left" if number > 20 else ""
        print(f"\r{f'{number} of {total}{left}: {title}'[:WIDTH]:<{WIDTH}}", end="", file=sys.stderr, flush=True)


def _progress_over() -> None:
    if sys.stderr.isatty():
        print(f"\r{'':<{WIDTH}}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
