"""What a second model costs that is loaded and idle: CPU time for each token of the first one, and of an idle server.

    python -m tools.serving_bench.idle_models                   the default model, and the same once more
    python -m tools.serving_bench.idle_models --other /models/other --rounds 5

In turns, a server of the model alone and one of both run; --streams streams get --tokens tokens each, then the server
is left alone for --idle seconds. CPU time is that of all processes of the server, so a busy machine disturbs it little;
seconds are not compared. Printed: medians over the rounds, and the ratio of both servers in each round.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp
import psutil

from pipeline.cli import option_types as types
from pipeline.cli.bench import words
from pipeline.cli.out_file import write_output
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from tools.benchmarks.served import Served, exit_code

PROMPT_WORDS = 60
SETTLED_S = 2.0
"""After the last stream."""


def cpu_s(server: Served) -> float:
    """The CPU time of all processes of the server."""
    top = psutil.Process(server.pid)
    times = [one.cpu_times() for one in (top, *top.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


async def load(server: Served, args: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def stream(index: int) -> None:
            body = {
                "model": "first",
                "prompt": words.text(f"idle/{index}", PROMPT_WORDS),
                "max_tokens": args.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            async with session.post("/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200 or "[DONE]" not in text:
                    raise UserError(f"{response.status}: {text[:200]}")

        await asyncio.gather(*(stream(index) for index in range(args.streams)))


def measure(folder: Path, models: dict[str, str], args: argparse.Namespace) -> tuple[float, float]:
    """CPU milliseconds for a token, and the share of a core of the idle server in percent."""
    if len(models) == 1:
        options = ["--model", models["first"], "--set", "served_model_name=first"]
    else:
        path = folder / "models.toml"
        lines = [f"[models.{name}]\nmodel = '{model}'" for name, model in models.items()]
        write_output(path, ("memory_bytes = '16GiB'\n" + "\n".join(lines) + "\n").encode())
        options = ["--config", str(path)]
    with Served(*args.set, options=options) as server:
        asyncio.run(load(server, args))  # pages, and the first requests' imports
        begun_s = cpu_s(server)
        asyncio.run(load(server, args))
        time.sleep(SETTLED_S)
        token_ms = (cpu_s(server) - begun_s) / (args.streams * args.tokens) * 1000
        begun_s = cpu_s(server)
        time.sleep(args.idle)
        return token_ms, (cpu_s(server) - begun_s) / args.idle * 100


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.serving_bench.idle_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=Settings().model, help="the model that serves; by default %(default)s")
    parser.add_argument("--other", help="the one that is idle; by default the same")
    parser.add_argument("--rounds", type=types.positive, default=4, metavar="N", help="by default %(default)s")
    parser.add_argument("--streams", type=types.positive, default=8, metavar="N", help="by default %(default)s")
    parser.add_argument("--tokens", type=types.positive, default=200, metavar="N", help="by default %(default)s")
    parser.add_argument("--idle", type=float, default=10.0, metavar="S", help="seconds, by default %(default)g")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the servers")
    args = parser.parse_args(arguments)
    return exit_code("idle_models", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    alone = {"first": args.model}
    both = alone | {"second": args.other or args.model}
    ratios, found = [], list[tuple[tuple[float, float], tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            order = (alone, both) if number % 2 == 0 else (both, alone)
            measured = {len(models): measure(Path(folder), models, args) for models in order}
            found.append((measured[1], measured[2]))
            ratios.append(measured[2][0] / measured[1][0])
            shown = "; ".join(
                f"{count} models: {token_ms:.3f} ms a token, idle {idle:.2f} %"
                for count, (token_ms, idle) in sorted(measured.items())
            )
            print(f"round {number + 1} of {args.rounds}: {shown}; ratio {ratios[-1]:.3f}", flush=True)
    for index, name in enumerate(("alone", "beside an idle model")):
        token_ms, idle = (median(one[index][value] for one in found) for value in (0, 1))
        print(f"{name}: {token_ms:.3f} ms of CPU time a token; idle {idle:.2f} % of a core")
    print(f"ratio: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
