"""What a person may ask for."""

import argparse
from pathlib import Path
from typing import NamedTuple

DESCRIPTION = """\
Check and measure the GPU executor on the machine at hand: one NVIDIA GPU of compute capability 9.0 (H100, H200), no
network. Prints a line for whatever is done, and a table last; --out keeps it as JSON and Markdown. Exit code 0 if
nothing was wrong, 1 if something was (the traceback is printed, and what follows goes on), 2 if there is no GPU. A
target of speed that is missed is no failure.
"""

EPILOG = """\
What it needs: Python 3.11 or newer with torch (CUDA), triton, numpy, safetensors, tokenizers and transformers, and what
the server itself imports. On a machine without a package registry take the rest along as wheels:

    pip download --only-binary=:all: --no-deps -d wheels --python-version 3.12 --implementation cp \\
        --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 pyzmq msgspec orjson 'llguidance>=1.9' gguf setproctitle
    python3 -m pip install --no-index --no-deps --target site wheels/*.whl     # on that machine
    PYTHONPATH=site python3 tools/gpu_check --out found

`--only machine` needs no wheels. --interpret runs the code of every section on the CPU at sizes that mean nothing, in
some minutes.
"""


class CheckSection(NamedTuple):
    """A part of the check, in processes of its own."""

    module: str
    budget_s: float
    """The most that it may take."""
    what: str
    num_processes: int = 1
    """Its items are divided among them, and it runs beside others that measure no time: what takes long is to compile,
    and that takes a core each."""
    is_alone: bool = True
    """It has the machine for itself."""


SECTIONS = {
    "kernels": CheckSection("kernels.all", 130, "every kernel against float64, on random inputs", 12, False),
    "texts": CheckSection("servers.texts", 130, "a small model's texts against the CPU executor", 2, False),
    "machine": CheckSection("machine.rates", 40, "rates and latencies of the machine itself"),
    "speed": CheckSection("speed.steps", 150, "steps of the executor at the shapes of 8B, 1B and 135M"),
    "http": CheckSection("servers.http", 80, "a server of the 135M shape and 256 clients"),
    "peers": CheckSection("servers.peers", 70, "transformers on the same shapes"),
    "breakdown": CheckSection("speed.breakdown", 45, "the kernels of a step, each with its time"),
}
WARM_UP = CheckSection("speed.warm_up", 130, "what the next sections compile", 6, False)
"""Goes before `speed`, beside the checks."""
TUNE_COMPILE = CheckSection("speed.tune_compile", 180, "what tune times, compiled", 14, False)
TUNE = CheckSection("speed.tune", 200, "times of kernels' candidates; only with --tune")
ALL = {**SECTIONS, "warm-up": WARM_UP, "tune-compile": TUNE_COMPILE, "tune": TUNE}

TOTAL_S = 460.0
"""Of all sections but tune."""


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    lines = "\n".join(f"    {name:9}  {section.what}" for name, section in SECTIONS.items())
    made = argparse.ArgumentParser(
        prog="gpu_check",
        description=f"{DESCRIPTION}\nSections:\n{lines}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--out", type=Path, metavar="FOLDER", help="write found.json and found.md there")
    made.add_argument("--only", type=_sections, metavar="SECTION,…", help="these sections, in their own order")
    made.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    made.add_argument(
        "--model", type=Path, metavar="FOLDER", help="compare texts of this model too: a folder or a .gguf"
    )
    made.add_argument("--tune", action="store_true", help="also time kernels' candidates, and write the table to --out")
    made.add_argument("--interpret", action="store_true", help="on the CPU, at tiny sizes: times mean nothing")
    made.add_argument("--inline", action="store_true", help="sections in this process, to debug them")
    made.add_argument("--child", metavar="JSON", help=argparse.SUPPRESS)
    return made


def _sections(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*SECTIONS, "tune"):
            raise argparse.ArgumentTypeError(f"no section {name!r}; there are {', '.join((*SECTIONS, 'tune'))}")
    return [name for name in (*SECTIONS, "tune") if name in names]
