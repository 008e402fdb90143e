#!/usr/bin/env python3
"""Measures what an input of /v1/embeddings costs besides the model: CPU time of each process, with an instant executor.

    tools/serving_bench/embedding_costs.py --model FOLDER
    tools/serving_bench/embedding_costs.py --model FOLDER --inputs 1 --clients 32 --check

Each client sends requests one after the other, each with the same number of inputs; by default there is one. CPU time
is the kernel's, of all threads of a process.

--check: exit with 1 if an input costs more than 0.4 ms of CPU with 64 inputs in a request, or more than 1 ms alone.
"""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.cli.profile.alone.clock import used  # noqa: E402
from tools.benchmarks.served import Served, exit_code  # noqa: E402

MAX_MS = {64: 0.4, 1: 1.0}
TEXT = "the sailor looked at the sea and thought of a story that his mother had heard from her own long ago"


def body_of(number: int, num_inputs: int, num_words: int) -> bytes:
    """No two inputs are alike."""
    words = TEXT.split()
    inputs = [
        f"{number} {i} " + " ".join(words[(number * 7 + i * 3 + k) % len(words)] for k in range(num_words))
        for i in range(num_inputs)
    ]
    return json.dumps({"input": inputs, "encoding_format": "base64"}).encode()


class Client:
    """A connection of its own."""

    def __init__(self, server: Served) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)

    def send(self, bodies: Sequence[bytes]) -> None:
        """Send them one after the other."""
        for body in bodies:
            self._connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            reply = self._connection.getresponse()
            data = reply.read()
            if reply.status != 200:
                raise SystemExit(f"{reply.status}: {data[:300].decode()}")

    def close(self) -> None:
        self._connection.close()


def measure(server: Served, num_inputs: int, num_words: int, total: int, num_clients: int) -> float:
    """Print the milliseconds of CPU that an input takes in each process, and return their sum."""
    bodies = [body_of(number, num_inputs, num_words) for number in range(total // num_inputs)]
    shares_of = [bodies[client::num_clients] for client in range(num_clients)]
    clients, pids = [Client(server) for _ in range(num_clients)], server.pids
    with ThreadPoolExecutor(num_clients) as threads:
        list(threads.map(Client.send, clients, [each[: max(1, len(each) // 5)] for each in shares_of]))
        before, begun = {name: used(pid) for name, pid in pids.items()}, time.monotonic()
        list(threads.map(Client.send, clients, shares_of))
    took_s, num = time.monotonic() - begun, len(bodies) * num_inputs
    shares = {name: 1e3 * used(pid).since(before[name]).cpu_s / num for name, pid in pids.items()}
    everything = sum(share for name, share in shares.items() if not name.startswith("execute"))
    stages = "  ".join(f"{name} {share:.3f}" for name, share in shares.items())
    per_input = f"{everything:.3f} ms of CPU an input without execute ({1e3 * took_s / num:.3f} ms of time)"
    print(f"{num_inputs:3} inputs a request, {num_clients} clients: {per_input}  {stages}")
    for client in clients:
        client.close()
    return everything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an embedding model, as for serve")
    parser.add_argument("--inputs", type=int, nargs="+", default=[64, 1], help="inputs of a request (default: 64 1)")
    parser.add_argument("--clients", type=int, default=1, help="clients that send at the same time (default: 1)")
    parser.add_argument("--words", type=int, default=18, help="words of an input (default: 18)")
    parser.add_argument("--total", type=int, default=6400, help="inputs to send for each measurement")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("serve", nargs="*", help="further options of serve, behind --")
    args = parser.parse_args()
    is_good = True
    with Served(options=["--instant", "--model", args.model, *args.serve]) as server:
        for num_inputs in args.inputs:
            total = args.total if num_inputs > 1 or args.clients > 1 else args.total // 8
            cost = measure(server, num_inputs, args.words, total, args.clients)
            is_good &= cost <= MAX_MS.get(num_inputs, MAX_MS[1])
    return 0 if is_good or not args.check else 1


if __name__ == "__main__":
    sys.exit(exit_code("embedding_costs", main))
