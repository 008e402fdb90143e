#!/usr/bin/env python3
"""Measures what a server of an embedding model promises: how soon it is ready, how long a long text delays a short one,
and that memory does not grow.

    tools/serving_bench/embedding_bounds.py --model FOLDER
    tools/serving_bench/embedding_bounds.py --model FOLDER --texts 100000 --check

ready      from the start of the command to the line `ready`, and the CPU time of all processes until then: the least
           of some starts after a first one
delay      of one-word texts, alone and while another connection sends one text after the other that is as long as the
           model takes
memory     resident memory of all processes after each fifth of the texts, sent in requests of 64

--check: exit with 1 if ready took more than 1.5 s, if a short text beside long ones took longer than the slowest of
these and twice what it takes alone, or if memory grew by more than a tenth after the first fifth.
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

from pipeline.cli.profile.alone.clock import memory_bytes, used  # noqa: E402
from tools.benchmarks.served import Served, exit_code  # noqa: E402
from tools.serving_bench.embedding_costs import Client, body_of  # noqa: E402

MAX_READY_S = 1.5
MAX_GROWTH = 1.1
NUM_STARTS = 3
NUM_SHORT = 100
TOKEN = 1000
"""Of the long text"""
INPUTS = 64
FIFTHS = 5


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


def memory_mib(server: Served, num_texts: int, num_words: int) -> list[float]:
    client, found = Client(server), []
    num = num_texts // INPUTS // FIFTHS
    for fifth in range(FIFTHS):
        for number in range(num):
            client.send([body_of(fifth * num + number, INPUTS, num_words)])
        found.append(sum(memory_bytes(pid)[0] for pid in _pids(server)) / 1024**2)
    return found


def summary(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ms, the slowest {max(times):.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an embedding model, as for serve")
    parser.add_argument("--texts", type=int, default=20_000, help="texts to embed (default: 20000)")
    parser.add_argument("--words", type=int, default=8, help="words of a text (default: 8)")
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
        memory = memory_mib(server, args.texts, args.words)
        print(f"memory   {' '.join(f'{one:.0f}' for one in memory)} MiB after each fifth of {args.texts:,} texts")
    is_good = ready <= MAX_READY_S and found.are_good and max(memory) <= MAX_GROWTH * memory[0]
    return 0 if is_good or not args.check else 1


if __name__ == "__main__":
    sys.exit(exit_code("embedding_bounds", main))
