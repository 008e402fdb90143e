"""Sends generated and mutated requests to a real server, over HTTP and ZeroMQ, many at once: none of them may fail it.

    python -m tools.fuzz_api                                    10,000 cases
    python -m tools.fuzz_api --cases 100000 --seed 7
    python -m tools.fuzz_api --seed 7 --only 123                one case, with its request and its reply
    python -m tools.fuzz_api --seed 7 --only zmq:45
    python -m tools.fuzz_api --set execute.dtype=bfloat16       with other settings
    python -m tools.fuzz_api --model "xlm-roberta, sequence"    with a tiny encoder of tests/stages/execute/encoders

The bodies are made from the server's own /openapi.json and then spoiled: other types, extreme numbers, deep nesting,
long and odd texts, torn and compressed bytes. Every twentieth case is a ZeroMQ connection with random messages. The
model is a tiny random one. A case fails on a status above 499, unless it is a 503 because others have the room or the
time that it needs, or a 504 after the time that the request gave itself; on a reply that is not HTTP or not complete in
time; and on an error that hasn't the form of its API. At the end, all processes are the same, nothing is open, no
traceback is in the log, and memory and descriptors have not grown since as many as half of the cases were sent before,
to warm up.

The exit code is 1 if something failed. A case depends on its number and the seed alone.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import zmq.asyncio

from tools.benchmarks.served import Served, exit_code
from tools.benchmarks.watch import sample
from tools.fuzz_api import messages
from tools.fuzz_api.cases import Cases
from tools.fuzz_api.http import Client, Problem, reason_of
from tools.soak.after import Idle, settle

ZMQ_EVERY = 20
MAX_SHOWN = 20
"""Problems after which no more cases are sent."""
MAX_GROWTH_BYTES = 96 * 1024**2
"""Of a process's memory: caches and its allocator."""
MIN_WARM_UP, MAX_WARM_UP = 200, 10_000
"""Cases before the first measurement: half as many as behind it, within these. PyTorch's and the grammars' caches take
130 MiB in the first 10,000 cases and 1 MiB for each 1,000 after that."""
TEMPLATE = (
    "{% if tools %}tools: {% for t in tools %}{{ t['function']['name'] }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default: 0)")
    parser.add_argument("--only", help="a single case: its number, or zmq: and its number")
    parser.add_argument("--parallel", type=int, default=32, help="cases at the same time (default: 32)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for a reply (default: 60)")
    parser.add_argument("--model", default="", help="a tiny encoder (default: a tiny Llama, which generates)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    args = parser.parse_args()
    return exit_code("fuzz_api", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-api-") as folder,
        Served(*settings(Path(folder), args.model), *args.set) as server,
    ):
        with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=args.deadline) as response:
            cases = Cases(json.load(response), args.seed)
        fuzz = Fuzz(server, cases, args)
        if args.only is not None:
            asyncio.run(fuzz.only(args.only))
        else:
            warm_up = min(max(MIN_WARM_UP, args.cases // 2), MAX_WARM_UP)
            asyncio.run(fuzz.send(range(warm_up)))
            fuzz.add(*settle(server))
            before, began_s = Idle(server), time.monotonic()
            asyncio.run(fuzz.send(range(warm_up, warm_up + args.cases)))
            took_s = time.monotonic() - began_s
            fuzz.add(*settle(server), *grown(server, before))
            print(f"\n{args.cases} cases in {took_s:.0f} s, {args.cases / took_s:.0f}/s: {fuzz.summary()}")
        fuzz.add(*health_of(server))
        if fuzz.problems:
            print(f"{len(fuzz.problems)} problems")
        return 1 if fuzz.problems else 0


def settings(folder: Path, encoder: str = "") -> list[str]:
    """Of a server with a tiny model in `folder`: an encoder of this name, or a Llama."""
    # Imported here: each takes seconds.
    from tests.stages.prepare.checkpoints import save_folder, tiny_llama

    if encoder:
        from tests.stages.execute.encoders.tiny_encoders import VARIANTS, make

        made = make(VARIANTS[encoder])
    else:
        made = tiny_llama()
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"} if encoder else {"chat_template": TEMPLATE}
    model = save_folder(folder / "tiny", made, tokenizer_config=tokenizer_config)
    return [
        f"model={model}",
        f"cache_dir={folder / 'cache'}",
        "execute.kernels=torch",
        "execute.num_threads=1",
        "execute.kv_cache_bytes=16MiB",
        f"max_model_len={120 if encoder else 128}",
        "supervisor.crash_reports=false",
    ]


def grown(server: Served, before: Idle) -> list[str]:
    """Resources whose use has grown."""
    found = Idle(server).grown_since(before)
    after = sample(server.pids)
    for name, num_bytes in before.sample.rss_bytes.items():
        more = after.rss_bytes[name] - num_bytes
        if more > MAX_GROWTH_BYTES:
            found.append(f"{name} has grown by {more / 1024**2:.0f} MiB, from {num_bytes / 1024**2:.0f}")
    return found


def health_of(server: Served) -> list[str]:
    """What the server says about itself."""
    found = []
    pids = {stage.name: stage.pid for stage in server.stats().stages}
    found += [f"{name} was restarted" for name, pid in server.pids.items() if pids.get(name) != pid]
    if (health := server.health())["status"] != "ok":
        found.append(f"the server is {health['status']}")
    if "Traceback" in (log := server.log()):
        found.append(f"a traceback in the log: {log[log.index('Traceback') - 300 :][:3000]}")
    return found


class Fuzz:
    """Sends cases and collects what is wrong."""

    def __init__(self, server: Served, cases: Cases, args: argparse.Namespace) -> None:
        self._server = server
        self._cases = cases
        self._args = args
        self._ends: Counter[str] = Counter()
        self._num_done = 0
        self.problems: list[str] = []

    async def send(self, numbers: range) -> None:
        """Send the cases with these numbers, some at a time."""
        left = iter(numbers)
        began_s = time.monotonic()
        context = zmq.asyncio.Context()

        async def work() -> None:
            client = Client(self._server.url, self._args.deadline)
            try:
                for number in left:
                    if len(self.problems) >= MAX_SHOWN:
                        return
                    await self._one(client, context, number)
                    self._num_done += 1
                    if self._num_done % 100 == 0:
                        self._show(numbers, began_s)
            finally:
                client.close()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._args.parallel):
                    tasks.create_task(work())
        finally:
            context.destroy(0)

    async def _one(self, client: Client, context: zmq.asyncio.Context, number: int) -> None:
        deadline_s, seed = self._args.deadline, self._args.seed
        try:
            if number % ZMQ_EVERY == 0:
                sent = messages.messages(seed, number)
                self._ends["zmq " + await messages.send(context, self._server.zmq, sent, deadline_s)] += 1
            else:
                reply = await client.send(self._cases.case(number))
                self._ends[f"{reply.status} {reason_of(reply)}".rstrip()] += 1
        except Problem as problem:
            name = f"zmq:{number}" if number % ZMQ_EVERY == 0 else str(number)
            what = (
                "" if number % ZMQ_EVERY == 0 else f" {self._cases.case(number).method} {self._cases.case(number).path}"
            )
            self.add(f"--seed {seed} --only {name}{what}: {problem}")

    def add(self, *problems: str) -> None:
        """Print problems and keep them."""
        for problem in problems:
            self.problems.append(problem)
            print(f"\n{problem}" if sys.stdout.isatty() else problem, flush=True)

    async def only(self, name: str) -> None:
        """Send one case and show it."""
        context = zmq.asyncio.Context()
        number = int(name.removeprefix("zmq:"))
        if name.startswith("zmq:"):
            for frames in messages.messages(self._args.seed, number):
                print(frames)
        else:
            print(self._cases.case(number).encoded())
        client = Client(self._server.url, self._args.deadline)
        try:
            await self._one(client, context, number)
            print(self.summary())
        finally:
            client.close()
            context.destroy(0)

    def summary(self) -> str:
        return ", ".join(f"{num} × {end}" for end, num in sorted(self._ends.items()))

    def _show(self, numbers: range, began_s: float) -> None:
        """A line of at most 80 columns, in a terminal in place of the one before."""
        done = self._num_done - numbers.start
        speed = done / max(0.001, time.monotonic() - began_s)
        failures = sum(num for end, num in self._ends.items() if end.startswith("5"))
        line = f"{done}/{len(numbers)} cases, {speed:.0f}/s, {failures} × 5xx, {len(self.problems)} problems"
        print(f"\r{line:<79.79}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
