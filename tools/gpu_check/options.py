"""The command line, and the sections with their time limits."""

import argparse
from pathlib import Path
from typing import NamedTuple

DESCRIPTION = """\
Check and measure the GPU executor on this machine. Needs one NVIDIA GPU of compute capability 9.0 (H100, H200) and no
network. Prints a line for each result and a table at the end; --out also writes JSON and Markdown. After an error the
check prints the traceback and continues. Exit code: 0 if all checks passed, 1 if a check failed or an error occurred,
2 without a GPU. A missed speed target is not a failure.
"""

EPILOG = """\
Requirements: Python 3.11 or newer with torch (CUDA), triton, numpy, safetensors, tokenizers, transformers, and the
server's dependencies. For a machine without a package registry, download the rest as wheels:

    pip download --only-binary=:all: --no-deps -d wheels --python-version 3.12 --implementation cp \\
        --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 pyzmq msgspec orjson 'llguidance>=1.9' gguf setproctitle
    python3 -m pip install --no-index --no-deps --target site wheels/*.whl     # on that machine
    PYTHONPATH=site python3 tools/gpu_check --out found

Add aiohttp, prometheus-client, psutil, rich and uvloop, and what they need, if the machine lacks them. Most of a first
run's time is compilation: TRITON_CACHE_DIR names a folder that you can keep for the next run.

`--only machine` needs no wheels. --interpret runs the code of every section on the CPU with tiny sizes, in some
minutes.
"""


class CheckSection(NamedTuple):
    """A part of the check. It runs in its own processes."""

    module: str
    budget_s: float
    """Time limit in seconds."""
    what: str
    num_processes: int = 1
    """Its items are divided among them. Sections with several processes run beside others that don't measure time: most
    of their time is compilation, which occupies one core per process."""
    is_alone: bool = True
    """Nothing else runs at the same time."""


SECTIONS = {
    "kernels": CheckSection("kernels.all", 130, "every kernel against float64, on random inputs", 10, False),
    "texts": CheckSection("servers.texts", 130, "a small model's outputs against the CPU executor", 5, False),
    "features": CheckSection("servers.features", 100, "the same with LoRA, experts, drafts, 8-bit cache", 7, False),
    "machine": CheckSection("machine.rates", 40, "rates and latencies of the hardware"),
    "speed": CheckSection("speed.steps", 150, "executor steps at the shapes of 8B, 1B and 135M"),
    "breakdown": CheckSection("speed.breakdown", 45, "the kernels of a step, each with its time"),
    "http": CheckSection("servers.http", 110, "a server of the 135M shape and 256 clients"),
    "peers": CheckSection("servers.peers", 70, "transformers on the same shapes"),
    "ranks": CheckSection("servers.ranks", 120, "tensor parallelism, if there are two GPUs"),
}
WARM_UP = CheckSection("speed.warm_up", 130, "compilation for the next sections", 6, False)
"""Runs before `speed`, beside the checks."""
TUNE_COMPILE = CheckSection("speed.tune_compile", 180, "compilation for tune", 14, False)
TUNE = CheckSection("speed.tune", 200, "times of GEMM candidates; only with --tune")
ALL = {**SECTIONS, "warm-up": WARM_UP, "tune-compile": TUNE_COMPILE, "tune": TUNE}

TOTAL_S = 460.0
"""Time limit of all sections without `tune`."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    lines = "\n".join(f"    {name:9}  {section.what}" for name, section in SECTIONS.items())
    made = argparse.ArgumentParser(
        prog="gpu_check",
        description=f"{DESCRIPTION}\nSections:\n{lines}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--out", type=Path, metavar="FOLDER", help="write found.json and found.md to this folder")
    made.add_argument(
        "--only", type=_sections, metavar="SECTION,…", help="run only these sections; their order is fixed"
    )
    made.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    made.add_argument(
        "--model", type=Path, metavar="FOLDER", help="also compare outputs of this model: a folder or a .gguf"
    )
    made.add_argument("--tune", action="store_true", help="also time GEMM candidates, and write the table to --out")
    made.add_argument("--interpret", action="store_true", help="run on the CPU with tiny sizes; times are meaningless")
    made.add_argument("--inline", action="store_true", help="run sections in this process, for debugging")
    made.add_argument("--child", metavar="JSON", help=argparse.SUPPRESS)
    return made


def _sections(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*SECTIONS, "tune"):
            raise argparse.ArgumentTypeError(f"unknown section {name!r}; choose from {', '.join((*SECTIONS, 'tune'))}")
    return [name for name in (*SECTIONS, "tune") if name in names]
