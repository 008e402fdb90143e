#!/usr/bin/env python3
"""Measures the cost of structured output, against a server that it starts; see `--help`.

Run it from anywhere with the project's Python. Paths in --set are relative to the repository's root.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmarks import structured  # noqa: E402
from tools.benchmarks.report import with_seed  # noqa: E402
from tools.benchmarks.served import exit_code  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=structured.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    structured.add(parser)
    args = with_seed(parser.parse_args(arguments))
    return exit_code("structured_benchmark", lambda: structured.run(args))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
