"""Compile every launch of `variants/` for a GPU that need not be present. Prints one JSON object per kernel variant.

    python -m tests.kernels.triton.compile [--all] [NAME ...]

Run this without TRITON_INTERPRET. --all adds the variants that take too long for a daily test.
"""

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

from tests.kernels.triton.pretending import pretend


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for a Hopper GPU.")
    parser.add_argument("names", nargs="*", help="of tests/kernels/triton/variants")
    parser.add_argument("--all", action="store_true", help="all models' sizes")
    args = parser.parse_args()
    driver = pretend()
    found = sorted(path.stem for path in (Path(__file__).parent / "variants").glob("[!_]*.py"))
    for name in args.names or found:
        module = importlib.import_module(f"tests.kernels.triton.variants.{name}")
        launches = getattr(module, "all_launches", module.launches) if args.all else module.launches
        launches()
        for compiled in driver.compiled:
            print(json.dumps({"of": name, **asdict(compiled)}), flush=True)
        driver.compiled.clear()


if __name__ == "__main__":
    main()
