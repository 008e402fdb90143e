"""How long one API key's requests wait while another key floods the server.

    python -m tools.serving_bench.fairness               every flood in turn, 20 rounds of the other key's requests each
    python -m tools.serving_bench.fairness --floods prompts grammars --rounds 50

It starts a server with two keys and sends the other key's requests in turns, first alone and then during each flood:
what each takes is printed, the median and the largest, in ms. What is waited for here is work of the stages before the
model; the requests generate at most one token. A flood is a process of its own at the lowest priority, so that neither
its Python nor its share of the cores delays the other key's client. Run it on a quiet machine.

Floods:

- "prompts": texts of 600,000 characters to /tokenize, six at a time
- "chats": chats of 6,000 messages, so that the template takes longer than the loop may wait
- "grammars": grammars whose checks take a second each, sixteen at a time
- "uploads": sixteen bodies that never end, over HTTP, and twice as many that are parsed
- "frames": large frames over ZeroMQ that never end, and as many connections as the gateway takes
"""

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pipeline.client import protocol as p
from pipeline.client.blocking_client import Client
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.stages.gateway.zmq import zmtp
from tools.benchmarks.served import Served, exit_code

MODEL = "SmolLM2-135M-Instruct"
KEYS = FLOODER, OTHER = "sk-of-the-client-that-floods", "sk-of-the-other-client-here"
TIMEOUT_S = 120.0
NUM_PROMPTS = 6
NUM_CHATS = 6
NUM_GRAMMARS = 16
NUM_UPLOADS = 16
NUM_FRAMES = 32
MIB = 1024**2
PROMPT_CHARS = 600_000
"""Of a flood's prompt: six of them stay below gateway.max_open_tokens, which is one limit for all keys."""
LONG_TEXT = "a long story of the sea. "
_numbers = itertools.count()


class Address:
    """Of a server: over HTTP and ZeroMQ."""

    def __init__(self, url: str, zmq: str) -> None:
        parts = urlsplit(url)
        self.http = parts.hostname or "", parts.port or 0
        self.zmq = zmq


def post(address: Address, key: str, path: str, body: Any) -> int:
    """The status of a request on a connection of its own. `body` is encoded if it isn't bytes."""
    connection = http.client.HTTPConnection(*address.http, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        return response.status


# -------------------------------------------------------------------------------------------- the other key's requests


def short_completion(address: Address) -> None:
    body = {"model": MODEL, "prompt": f"Hello {next(_numbers)}", "max_tokens": 1}
    assert post(address, OTHER, "/v1/completions", body) == 200


def long_prompt(address: Address) -> None:
    """30,000 characters, which a thread encodes."""
    body = {"model": MODEL, "prompt": (f"{next(_numbers)} " + LONG_TEXT * 1200)[:30_000]}
    assert post(address, OTHER, "/tokenize", body) == 200


def new_grammar(address: Address) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "guided_regex": f"[a-z]+{next(_numbers)}"}
    assert post(address, OTHER, "/v1/completions", body) == 200


def large_body(address: Address) -> None:
    """100 kB, which waits for its turn to be parsed."""
    body = {"model": "another", "prompt": f"{next(_numbers)}" + " " * 100_000}
    assert post(address, OTHER, "/v1/completions", body) == 404


def zmq_request(address: Address) -> None:
    """On a connection of its own, with hello."""
    with Client.connect(address.zmq, timeout_s=TIMEOUT_S, api_key=OTHER) as client:
        for _ in client.generate(f"Hello {next(_numbers)}", SamplingParams(max_tokens=1)):
            pass


PROBES: dict[str, Callable[[Address], None]] = {
    "a short completion": short_completion,
    "a prompt of 30 kB": long_prompt,
    "a new grammar": new_grammar,
    "a body of 100 kB": large_body,
    "a request over ZeroMQ": zmq_request,
}


# --------------------------------------------------------------------------------------------------------- the floods


class Flood:
    """Threads that repeat a request of the flooding key, and sockets that stay open, until its process ends."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def repeat(self, send: Callable[[], object], num: int) -> None:
        """`num` at a time."""

        def run() -> None:
            while True:
                try:
                    send()
                except (OSError, http.client.HTTPException):  # it was given up for others
                    time.sleep(0.1)

        for _ in range(num):
            threading.Thread(target=run, daemon=True).start()

    def hold(self, address: tuple[str, int], data: bytes) -> None:
        """A connection that sends this, as far as the server takes it, and no more."""
        self._sockets.append(connection := socket.create_connection(address, timeout=0.2))
        with contextlib.suppress(OSError):
            connection.sendall(data)


def prompts(flood: Flood, address: Address) -> None:
    text = (LONG_TEXT * 42_000)[:PROMPT_CHARS]
    body = json.dumps({"model": MODEL, "prompt": text}).encode()
    flood.repeat(lambda: post(address, FLOODER, "/tokenize", body), NUM_PROMPTS)


def chats(flood: Flood, address: Address) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] * 3000
    body = json.dumps({"model": MODEL, "messages": [*messages, messages[0]]}).encode()
    flood.repeat(lambda: post(address, FLOODER, "/tokenize", body), NUM_CHATS)


def grammars(flood: Flood, address: Address) -> None:
    endless = "start: A\nA: " + " & ".join(f"/(.*[{chr(97 + i)}].{{{i}}})*/" for i in range(1, 20))

    def send() -> int:
        grammar = f"{endless} & /[^{next(_numbers)}]*/"
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "guided_grammar": grammar}
        return post(address, FLOODER, "/v1/completions", body)

    flood.repeat(send, NUM_GRAMMARS)


def uploads(flood: Flood, address: Address) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {FLOODER}\r\n"
        f"Content-Length: {4 * MIB}\r\n\r\n"
    )
    for _ in range(NUM_UPLOADS):
        flood.hold(address.http, head.encode() + b" " * (4 * MIB - 100))
    body = json.dumps({"model": "another", "prompt": list(range(400_000))}).encode()
    flood.repeat(lambda: post(address, FLOODER, "/v1/completions", body), 2 * NUM_UPLOADS)


def frames(flood: Flood, address: Address) -> None:
    host, _, port = address.zmq.removeprefix("tcp://").rpartition(":")
    hello = zmtp.message(msgspec.msgpack.encode(p.Hello(2, 2, "a flood", FLOODER)))
    begin = zmtp.GREETING + zmtp.ready(b"DEALER") + hello
    frame = zmtp.message(bytes(4 * MIB - 100))
    for number in range(NUM_FRAMES):
        flood.hold((host, int(port)), begin + frame[: 1000 if number % 2 else -100])
    for _ in range(200):
        flood.hold((host, int(port)), zmtp.GREETING)
    for _ in range(900):
        flood.hold((host, int(port)), begin)


FLOODS: dict[str, Callable[[Flood, Address], None]] = {
    "prompts": prompts,
    "chats": chats,
    "grammars": grammars,
    "uploads": uploads,
    "frames": frames,
}


@contextlib.contextmanager
def flooded(name: str, address: Address) -> Iterator[None]:
    """A flood in a process of its own, from when all its clients have begun."""
    spawn = multiprocessing.get_context("spawn")
    has_begun = spawn.Event()
    process = spawn.Process(target=run_flood, args=(name, address, has_begun), daemon=True)
    process.start()
    try:
        assert has_begun.wait(TIMEOUT_S), f"the flood of {name} did not begin within {TIMEOUT_S:g} s"
        yield
    finally:
        process.terminate()
        process.join(TIMEOUT_S)


def run_flood(name: str, address: Address, has_begun: Event) -> None:
    os.nice(19)
    FLOODS[name](Flood(), address)
    has_begun.set()
    threading.Event().wait()  # for the signal that ends this process


# -------------------------------------------------------------------------------------------------------- measurement


def waits_of(address: Address, num_rounds: int) -> dict[str, list[float]]:
    """Seconds that each probe takes, in turns."""
    waits: dict[str, list[float]] = {name: [] for name in PROBES}
    for _ in range(num_rounds):
        for name, probe in PROBES.items():
            begin_s = time.monotonic()
            probe(address)
            waits[name].append(time.monotonic() - begin_s)
    return waits


def settings(zmq: str) -> list[str]:
    """`zmq` is an address at tcp://, where keys count."""
    return [f"gateway.zmq={zmq}", f"execute.kv_cache_bytes={192 * MIB}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS), help="default: all")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the other key's requests (20)")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as one:
        zmq = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    print(f"{'flood':10} {'request of the other key':24} {'alone':>14} {'in the flood':>14} {'added':>6}")
    with Served(*settings(zmq), environ={"PIPELINE_API_KEYS": ",".join(KEYS)}) as server:
        address = Address(server.url, zmq)
        waits_of(address, 3)
        for name in arguments.floods:
            alone = waits_of(address, arguments.rounds)
            with flooded(name, address):
                time.sleep(1.0)  # until the flood has filled the queues
                flooded_waits = waits_of(address, arguments.rounds)
            for probe in PROBES:
                medians = [1e3 * statistics.median(waits[probe]) for waits in (alone, flooded_waits)]
                longest = [1e3 * max(waits[probe]) for waits in (alone, flooded_waits)]
                columns = [f"{m:6.1f} ({most:5.0f})" for m, most in zip(medians, longest, strict=True)]
                print(
                    f"{name:10} {probe:24} {columns[0]:>14} {columns[1]:>14} {medians[1] - medians[0]:6.1f}", flush=True
                )
            time.sleep(3.0)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("fairness", main))
