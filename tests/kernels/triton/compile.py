"""Compile every launch of `variants/` for a GPU that need not be present. Prints one JSON object per kernel variant.

    python -m tests.kernels.triton.compile [--all] [NAME ...]

Run this without TRITON_INTERPRET. --all adds the variants that take too long for a daily test.
"""

import argparse
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from triton import knobs

from tests.kernels.triton.pretending import pretend

EXTREME = re.compile(r"\b((?:max|min)\.(?:\w+\.)*b?f(?:16|32|64)(?:x2)?)\b")
"""PTX instructions for the larger or smaller of two floats. Without `.NaN`, one that is NaN loses."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for a Hopper GPU.")
    parser.add_argument("names", nargs="*", help="of tests/kernels/triton/variants")
    parser.add_argument("--all", action="store_true", help="all models' sizes")
    args = parser.parse_args()
    driver = pretend()
    extremes: list[list[str]] = []

    def note(*, metadata_group: Mapping[str, str], **_: object) -> None:
        """Called for each variant that is compiled, or found in Triton's cache, before it is loaded."""
        (ptx,) = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
        extremes.append(sorted(set(EXTREME.findall(Path(ptx).read_text()))))

    knobs.compilation.listener = note
    found = sorted(path.stem for path in (Path(__file__).parent / "variants").glob("[!_]*.py"))
    for name in args.names or found:
        module = importlib.import_module(f"tests.kernels.triton.variants.{name}")
        launches = getattr(module, "all_launches", module.launches) if args.all else module.launches
        launches()
        for compiled, found_extremes in zip(driver.compiled, extremes, strict=True):
            print(json.dumps({"of": name, **asdict(compiled), "extremes": found_extremes}), flush=True)
        driver.compiled.clear()
        extremes.clear()


if __name__ == "__main__":
    main()
