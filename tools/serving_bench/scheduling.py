#!/usr/bin/env python3
"""Benchmarks of scheduling and KV memory, each against servers that it starts itself.

    tools/serving_bench/scheduling.py memory        KV memory for a quarter of the load: preemption auto, or recompute
    tools/serving_bench/scheduling.py long-prompt   a prompt of 4,000 tokens beside 16 running streams
    tools/serving_bench/scheduling.py no-hits       the cost of prefix caching without any hits
    tools/serving_bench/scheduling.py overload      ten times as many requests as can be served
    tools/serving_bench/scheduling.py shared        a shared prefix of 600 words

`SUBJECT --help` describes a benchmark. All have --rounds or --seconds, --set KEY=VALUE for settings of every server,
--json FILE and --check. With --check the exit code is 1 if a bound is missed or a request fails. Run it from anywhere
with the project's Python. Paths in --set are relative to the repository's root.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmarks import long_prompt, memory, no_hits, overload, shared  # noqa: E402
from tools.benchmarks.report import with_seed  # noqa: E402
from tools.benchmarks.served import exit_code  # noqa: E402

SUBJECTS = {
    "memory": memory,
    "long-prompt": long_prompt,
    "no-hits": no_hits,
    "overload": overload,
    "shared": shared,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, subject in SUBJECTS.items():
        assert subject.__doc__ is not None
        one = subjects.add_parser(
            name,
            help=subject.__doc__.partition(": ")[2].partition("\n")[0],
            description=subject.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subject.add(one)
        one.set_defaults(run=subject.run)
    args = with_seed(parser.parse_args(arguments))
    return exit_code("scheduling_benchmarks", lambda: args.run(args))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
