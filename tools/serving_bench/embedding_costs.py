#!/usr/bin/env python3
"""Measures what an input of /v1/embeddings costs besides the model: CPU time of each process, with an instant executor.

    tools/serving_bench/embedding_costs.py --model FOLDER
    tools/serving_bench/embedding_costs.py --model FOLDER --inputs 1 --clients 32 --check
    tools/serving_bench/embedding_costs.py --model FOLDER --against ../other-tree --rounds 9    A B B A …

Each client sends requests one after the other, each with the same number of inputs; by default there is one. A request
is sent in one piece. CPU time is the kernel's, of all threads of a process.

--against: both servers run at once and are loaded in turns. The figures are medians; those in brackets are the least,
which other programs disturbed least.

--check: exit with 1 if an input costs more than 0.4 ms of CPU with 64 inputs in a request, or more than 1 ms alone.
"""

import argparse
import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.cli.profile.alone.clock import used  # noqa: E402
from tools.benchmarks.pairs import Reading, compare  # noqa: E402
from tools.benchmarks.served import Served, exit_code  # noqa: E402

MAX_MS = {64: 0.4, 1: 1.0}
TEXT = "the sailor looked at the sea and thought of a story that his mother had heard from her own long ago"
TIMEOUT_S = 60.0
"""Without a reply."""
ALL = "all but execute"


def body_of(number: int, num_inputs: int, num_words: int) -> bytes:
    """No two inputs are alike."""
    words = TEXT.split()
    inputs = [
        f"{number} {i} " + " ".join(words[(number * 7 + i * 3 + k) % len(words)] for k in range(num_words))
        for i in range(num_inputs)
    ]
    return json.dumps({"input": inputs, "encoding_format": "base64"}).encode()


class Client:
    """A connection of its own, on which a request is sent when the reply to the one before has come."""

    def __init__(self, server: Served) -> None:
        netloc = urlsplit(server.url)
        self.socket = socket.create_connection((netloc.hostname, netloc.port), TIMEOUT_S)
        self._head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {netloc.netloc}\r\nContent-Type: application/json\r\n"
        self._reply = b""

    def send(self, bodies: Sequence[bytes]) -> None:
        """Send them one after the other. Blocks; exits if a reply is an error."""
        for body in bodies:
            self.begin(body)
            while not self.has_reply():
                pass

    def begin(self, body: bytes) -> None:
        """Send a request."""
        self.socket.sendall(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def has_reply(self) -> bool:
        """Read what has come. Returns whether the reply is complete. Exits if it is an error."""
        if not (data := self.socket.recv(1 << 20)):
            raise SystemExit("the server has closed the connection")
        self._reply += data
        head, end, body = self._reply.partition(b"\r\n\r\n")
        if not end:
            return False
        if not self._reply.startswith(b"HTTP/1.1 200"):
            raise SystemExit(self._reply[:300].decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) < int(length.partition(b":")[2]):
            return False
        self._reply = b""
        return True

    def close(self) -> None:
        self.socket.close()


def send_all(clients: list[Client], bodies: Iterator[bytes]) -> None:
    """Send all requests, one of each client at a time."""
    with selectors.DefaultSelector() as selector:
        num_open = 0
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            if (body := next(bodies, None)) is not None:
                client.begin(body)
                num_open += 1
        while num_open:
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise SystemExit(f"no reply within {TIMEOUT_S:g} s")
            for key, _ in ready:
                client = key.data
                if client.has_reply():
                    num_open -= 1
                    if (body := next(bodies, None)) is not None:
                        client.begin(body)
                        num_open += 1


def measure(server: Served, num_inputs: int, num_words: int, total: int, num_clients: int) -> Reading:
    """The milliseconds of CPU that an input takes in each process, their sum, and the time."""
    bodies = [body_of(number, num_inputs, num_words) for number in range(total // num_inputs)]
    clients, pids = [Client(server) for _ in range(num_clients)], server.pids
    send_all(clients, iter(bodies[: max(num_clients, len(bodies) // 5)]))
    before, begun = {name: used(pid) for name, pid in pids.items()}, time.monotonic()
    send_all(clients, iter(bodies))
    took_s, num = time.monotonic() - begun, len(bodies) * num_inputs
    shares = {name: 1e3 * used(pid).since(before[name]).cpu_s / num for name, pid in pids.items()}
    for client in clients:
        client.close()
    everything = sum(share for name, share in shares.items() if not name.startswith("execute"))
    return {ALL: everything, **shares, "time": 1e3 * took_s / num}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an embedding model, as for serve")
    parser.add_argument("--inputs", type=int, nargs="+", default=[64, 1], help="inputs of a request (default: 64 1)")
    parser.add_argument("--clients", type=int, default=1, help="clients that send at the same time (default: 1)")
    parser.add_argument("--words", type=int, default=18, help="words of an input (default: 18)")
    parser.add_argument("--total", type=int, default=6400, help="inputs to send for each measurement")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another working tree")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each tree (default: 1)")
    parser.add_argument("--with-model", action="store_true", help="compute the vectors; not for --check")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("serve", nargs="*", help="further options of serve, behind --")
    args = parser.parse_args()
    instant = [] if args.with_model else ["--instant"]
    options, is_good = [*instant, "--model", args.model, *args.serve], True
    trees = [ROOT] if args.against is None else [args.against.resolve(), ROOT]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Served(options=options, root=tree)) for tree in trees]
        for num_inputs in args.inputs:
            total = args.total if num_inputs > 1 or args.clients > 1 else args.total // 4

            def one(arm: int, _: int, num_inputs: int = num_inputs, total: int = total) -> Reading:
                return measure(servers[arm], num_inputs, args.words, total, args.clients)

            print(f"{num_inputs} inputs a request, {args.clients} clients: ms of CPU an input")
            if len(servers) == 1:
                last = [one(0, number) for number in range(args.rounds)]
            else:
                comparison = compare(("other", "this"), args.rounds, one, lambda _: None)
                last = comparison.readings[1]
                print(f"  other  {_line(comparison.readings[0])}")
                ratios = {name: comparison.ratio(name) for name in (ALL, "time")}
                print(
                    "  this / other",
                    *(f"{name} {r.median:.3f} ({r.low:.3f}-{r.high:.3f})" for name, r in ratios.items() if r),
                )
            print(f"  this   {_line(last)}", flush=True)
            is_good &= median(reading[ALL] for reading in last) <= MAX_MS.get(num_inputs, MAX_MS[1])
    return 0 if is_good or not args.check else 1


def _line(readings: list[Reading]) -> str:
    """The median of each figure, and the least."""
    each = {name: sorted(reading[name] for reading in readings) for name in readings[0]}
    return "  ".join(f"{name} {median(one):.3f} ({one[0]:.3f})" for name, one in each.items())


if __name__ == "__main__":
    sys.exit(exit_code("embedding_costs", main))
