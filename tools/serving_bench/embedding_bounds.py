#!/usr/bin/env python3
"""Measures what a server of an embedding model promises: how soon it is ready, and how long a long text delays a short
one. embedding_memory.py measures that memory does not grow.

    tools/serving_bench/embedding_bounds.py --model FOLDER --check

ready      from the start of the command to the line `ready`, and the CPU time of all processes until then: the least
           of some starts after a first one
delay      of one-word texts, alone and while another connection sends one text after the other that is as long as the
           model takes

--check: exit with 1 if ready took more than 1.5 s, or if a short text beside long ones took longer than the slowest of
these and twice what it takes alone.
"""

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.cli.profile.alone.clock import used  # noqa: E402
from tools.benchmarks.served import Served, exit_code  # noqa: E402
from tools.serving_bench.embedding_costs import Client  # noqa: E402

MAX_READY_S = 1.5
NUM_STARTS = 3
NUM_SHORT = 100
TOKEN = 1000
"""Of the long text"""


def _pids(server: Served) -> list[int]:
    return [server.pid, *server.pids.values()]


def max_model_len(server: Served) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/models") as reply:
        return int(json.load(reply)["data"][0]["max_model_len"])


def starts(options: list[str]) -> tuple[float, float]:
    """Seconds until ready, and of CPU until then."""
    found = []
    for _ in range(1 + NUM_STARTS):
        with Served(options=options) as server:
            found.append((server.ready_s, sum(used(pid).cpu_s for pid in _pids(server))))
    ready, cpu = zip(*found[1:], strict=True)
    return min(ready), min(cpu)


def timed(client: Client, bodies: list[bytes]) -> list[float]:
    """Milliseconds that each of these takes."""
    times = []
    for body in bodies:
        begun = time.perf_counter()
        client.send([body])
        times.append(1e3 * (time.perf_counter() - begun))
    return times


class Delays(NamedTuple):
    """Milliseconds that each text took."""

    short: list[float]
    """Alone"""
    long: list[float]
    beside: list[float]
    """Short ones, beside the long ones"""

    @property
    def are_good(self) -> bool:
        return max(self.beside) <= max(self.long) + 2 * statistics.median(self.short)


def delays(server: Served) -> Delays:
    short = [json.dumps({"input": f"sea {number}"}).encode() for number in range(NUM_SHORT)]
    long = json.dumps({"input": [[TOKEN] * max_model_len(server)]}).encode()
    client, other = Client(server), Client(server)
    timed(client, short + [long] * 4)  # warm
    alone, stop, long_times = timed(client, short), threading.Event(), []

    def flood() -> None:
        while not stop.is_set():
            long_times.extend(timed(other, [long]))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        beside = timed(client, short)
    finally:
        stop.set()
        thread.join()
    return Delays(alone, long_times, beside)


def summary(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ms, the slowest {max(times):.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an embedding model, as for serve")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("serve", nargs="*", help="further options of serve, behind --")
    args = parser.parse_args()
    options = ["--model", args.model, *args.serve]
    ready, cpu = starts(options)
    print(f"ready    {ready:.2f} s, {cpu:.2f} s of CPU", flush=True)
    with Served(options=options) as server:
        found = delays(server)
        print(f"delay    short texts alone {summary(found.short)}")
        print(f"         beside long ones  {summary(found.beside)}; long ones {summary(found.long)}", flush=True)
    is_good = ready <= MAX_READY_S and found.are_good
    return 0 if is_good or not args.check else 1


if __name__ == "__main__":
    sys.exit(exit_code("embedding_bounds", main))
