"""Runs random load against a real server for a long time, and checks that the server stays correct.

    python -m tools.soak                  20 minutes
    python -m tools.soak --minutes 0.2           a quick look; too short to check memory
    python -m tools.soak --kill 10               the same, and a stage is killed about every 10 seconds
    python -m tools.soak --adapters              the same, and LoRA adapters are loaded and unloaded all the time
    python -m tools.soak --set schedule.max_steps_in_flight=1 --seed 7 --json soak.json

Requests come over HTTP (streaming or not) and over ZeroMQ. They have short and long prompts, shared prefixes, n from 1
to 4, stop strings, priorities, cache salts and deadlines, as far as the server supports them. The concurrency changes
all the time, between 1 and 40. One client in five leaves before its reply is complete. KV memory is so small that
sequences are preempted constantly, and swap space so small that some are swapped and some are recomputed.

Checked during the load: each sequence of each reply ends exactly once; the only statuses are 200, 503 at the limit of
open requests, and 408 or 504 for requests with a deadline; fixed greedy probes always return the same ids.

Checked afterwards, without clients: nothing is open, running, waiting, swapped or held; descriptors and shared-memory
arenas are as before; each process's resident memory is flat, which means that its median in the last quarter is at
most 3 % + 8 MB above that of the second quarter (from 3 minutes on; not of stages that were killed); the server's log
has no error, its exit code is 0, and no process is left.

With --kill, a request that was computed in several deaths of the executor may fail: the server can't know that it is
innocent. Such requests are counted as "suspected".

The exit code is 1 if any check fails. The seed determines the requests, but not their timing.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import psutil

from pipeline.cli import option_types as types
from pipeline.cli.bench.client import ServerError, open_session
from pipeline.cli.out_file import PRIVATE, require_writable, write_output, writing
from pipeline.client.client import AsyncClient
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.config.load import ConfigError
from pipeline.errors import UserError
from tools.benchmarks.report import with_seed
from tools.benchmarks.served import Served, ending_in_order
from tools.benchmarks.watch import Watch, memory_of
from tools.soak import adapters, probes
from tools.soak.adapters import KEPT, Adapters
from tools.soak.after import Idle, settle
from tools.soak.clients import OVERLOADED, PATIENCE_S, Outcome, known_extras, over_http, over_zmq
from tools.soak.kills import EXPECTED, Killer
from tools.soak.patience import patience
from tools.soak.requests import RandomRequest, draw

SETTINGS = (
    "execute.kv_cache_bytes=60MiB",
    "execute.swap_bytes=24MiB",
    "schedule.max_steps_in_flight=2",
    "schedule.policy=priority",
    "schedule.max_num_seqs=24",
    "gateway.max_open_sequences=96",
)
MOST = 40
MOST_WITH_KILLS = 12
"""After each kill, much is computed again. With more requests, those of low priority would wait for too long."""
CONCURRENCIES = (1.0, 0.5, 0.25, 0.08, 0.0)
"""Fractions of the maximum concurrency, at least one request. The first is used first, then random ones."""
PHASE_S = (2.0, 12.0)
PROBE_EVERY_S = 1.0
AFTER_REFUSAL_S = 0.3
MIN_JUDGED_S = 180.0
SESSION_S = 86_400.0
"""Longer than any run: each request has a limit of its own."""
SUSPENDED = re.compile(r"^.* supervisor\.0 was suspended .*$", re.MULTILINE)
MAX_SHOWN = 20
REPORT_EVERY_S = 30.0


class Soak:
    """The state of one run."""

    def __init__(
        self,
        server: Served,
        seconds: float,
        most: int,
        seed: int,
        killer: Killer | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._most = most
        self._killer, self._adapters = killer, adapters
        self._known: frozenset[str] = frozenset()
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_probes = 0

    async def run(self) -> None:
        # A connection that breaks is a fault.
        connecting = AsyncClient.connect(self._server.zmq, reconnect_timeout_s=0)
        async with open_session(None, SESSION_S) as session, await connecting as client:
            self._known = await known_extras(session, self._server.url, client.info.model)
            print(f"the server takes {', '.join(sorted(self._known)) or 'no extra fields'}", flush=True)
            if self._adapters is not None:
                await self._adapters.start(session)
            names: list[str | None] = [None] if self._adapters is None else [None, KEPT]
            expected = [
                (index, name, await probes.answer(client, index, adapter=name))
                for index in range(len(probes.PROMPTS))
                for name in names
            ]
            end = time.monotonic() + self._seconds
            async with asyncio.TaskGroup() as group:
                for index, name, answer in expected:
                    group.create_task(self._probe(client, index, name, answer, end))
                group.create_task(self._load(session, client, end))
                if self._killer is not None:
                    group.create_task(self._killer.run(end))
                if self._adapters is not None:
                    group.create_task(self._adapters.run(session, end))
            for index, name, answer in expected:  # once more, without other load
                self._compare(index, name, answer, await self._accepted_answer(client, index, name))

    def _found(self, fault: str) -> None:
        """Count a fault. The first of its kind is printed at once: a run that is stopped prints no summary."""
        self.faults[fault] += 1
        if self.faults[fault] == 1 and len(self.faults) <= MAX_SHOWN:
            print(f"FAULT: {fault}", flush=True)

    async def _load(self, session: aiohttp.ClientSession, client: AsyncClient, end: float) -> None:
        """Keep a changing number of requests in flight. At the end all replies are read."""
        rng, tasks = self._rng, set[asyncio.Task[None]]()
        target, reported_s = self._most, time.monotonic()
        phase_end = reported_s + PHASE_S[0]
        while (now := time.monotonic()) < end:
            if now >= phase_end:
                target = max(1, round(rng.choice(CONCURRENCIES) * self._most))
                phase_end = now + rng.uniform(*PHASE_S)
            if now >= reported_s + REPORT_EVERY_S:
                reported_s = now
                print(f"{end - now:5.0f} s to go: {dict(self.outcomes)}", flush=True)
            while len(tasks) < target:
                tasks.add(asyncio.create_task(self._one(session, client, draw(rng, self._known))))
            done, tasks = await asyncio.wait(
                tasks, timeout=min(phase_end, end) - now, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        if tasks:
            await asyncio.gather(*tasks)

    async def _one(self, session: aiohttp.ClientSession, client: AsyncClient, ask: RandomRequest) -> None:
        model = client.info.model
        name = model if self._adapters is None else self._adapters.choose(model)
        if ask.protocol == "http":
            outcome = await over_http(session, self._server.url, name, ask)
        else:
            outcome = await over_zmq(client, ask, None if name == model else name)
        if self._adapters is not None and name != model and outcome.words.startswith("404"):
            outcome = Outcome("unloaded")  # between the choice and the request
        self._note(outcome)
        if outcome.kind == "refused":
            await asyncio.sleep(AFTER_REFUSAL_S)

    def _note(self, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        if outcome.kind == "wrong":
            self._found(outcome.words)

    async def _probe(
        self, client: AsyncClient, index: int, name: str | None, expected: probes.Answer, end: float
    ) -> None:
        """Repeat one probe with varying priorities, so that it is sometimes first and sometimes preempted."""
        rng = random.Random(index)
        while time.monotonic() < end:
            priority = rng.randint(-3, 3) if "priority" in self._known else 0
            pause_s = PROBE_EVERY_S
            try:
                async with patience(PATIENCE_S):
                    self._compare(index, name, expected, await probes.answer(client, index, priority, name))
            except RequestError as error:
                pause_s = AFTER_REFUSAL_S
                if error.status != OVERLOADED:
                    self._found(f"probe {index}: {error.status}: {error.message}")
            except (TimeoutError, ConnectionLost) as error:
                self._found(f"probe {index}: {str(error) or 'no end in time'}")
            await asyncio.sleep(pause_s)

    async def _accepted_answer(self, client: AsyncClient, index: int, name: str | None) -> probes.Answer:
        """The output for a probe, which is sent again while the server refuses it: the last kill may be too recent."""
        async with patience(PATIENCE_S):
            while True:
                try:
                    return await probes.answer(client, index, adapter=name)
                except RequestError as error:
                    if error.status != OVERLOADED:
                        raise
                await asyncio.sleep(AFTER_REFUSAL_S)

    def _compare(self, index: int, name: str | None, expected: probes.Answer, found: probes.Answer) -> None:
        self.num_probes += 1
        if words := probes.difference(expected, found):
            self._found(f"probe {index}{f' of {name}' if name else ''}: {words}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="duration of the load; by default %(default)g")
    parser.add_argument(
        "--most",
        type=types.positive,
        metavar="N",
        help=f"maximum of concurrent requests; by default {MOST}, and {MOST_WITH_KILLS} with --kill",
    )
    parser.add_argument(
        "--kill", type=types.positive, metavar="EVERY_S", help="kill a random stage about every so many seconds"
    )
    parser.add_argument("--adapters", action="store_true", help="use LoRA adapters, and load and unload them meanwhile")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--seed", type=types.natural, default=None, help="seed of the requests; by default random")
    parser.add_argument("--log", metavar="FILE", help="write the server's log to this file")
    parser.add_argument("--json", metavar="FILE", help="write the findings and all memory samples to this file")
    args = with_seed(parser.parse_args(arguments))
    try:
        if args.json:
            require_writable(Path(args.json), "--json")
        if args.log:
            require_writable(Path(args.log), "--log")
        with ending_in_order():
            found = soak(args)
        if args.json:
            with writing(Path(args.json), "--json"):
                write_output(Path(args.json), msgspec.json.encode(found))
    except (UserError, ServerError, ConfigError, ConnectionLost) as error:
        print(f"soak: error: {error}", file=sys.stderr)
        return 2
    return 1 if found["faults"] else 0


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run the test, print the findings and return them for JSON. `faults` is empty if there are none."""
    seconds = 60 * args.minutes
    print(f"{args.minutes:g} minutes of load, seed {args.seed}", flush=True)
    extra: tuple[str, ...] = ("supervisor.max_restarts=1000",) if args.kill else ()
    extra += adapters.SETTINGS if args.adapters else ()
    with tempfile.TemporaryDirectory() as folder, Served(*SETTINGS, *extra, *args.set) as server:
        before = Idle(server)
        killer = Killer(server, args.kill, args.seed) if args.kill else None
        most = args.most or (MOST_WITH_KILLS if args.kill else MOST)
        changes = Adapters(server, Path(folder), args.seed) if args.adapters else None
        if changes is not None:
            changes.write(adapters.config_of(args.set))
        load = Soak(server, seconds, most, args.seed, killer, changes)
        with Watch(server.pids) as watch:
            asyncio.run(load.run())
        faults = load.faults
        if changes is not None:
            faults.update(changes.faults)
            print(f"{changes.num_loads} loads and {changes.num_unloads} unloads of adapters")
        faults.update(f"after the load: {words}" for words in settle(server))
        faults.update(f"after the load: {words}" for words in Idle(server).grown_since(before))
        memory = memory_of(watch.samples) if len(watch.samples) >= 4 else []
        is_judged = seconds >= MIN_JUDGED_S
        for one in memory:
            if killer is not None and killer.pauses_s.get(one.name):
                continue
            words = f"{one.name}: {one.second / 1e6:.1f} MB in the second quarter, {one.last / 1e6:.1f} in the last"
            print(f"memory of {words}, at most {one.most / 1e6:.1f}")
            if is_judged and not one.is_flat:
                faults[f"memory grows: {words}"] += 1
        if not is_judged:
            print(f"memory was not checked: the run was shorter than {MIN_JUDGED_S / 60:g} minutes")
        counts = server.schedule()
        if (code := server.stop()) != 0:
            faults[f"the server ended with exit code {code}"] += 1
        log = server.log()
        if args.log:
            with writing(Path(args.log), "--log"):
                write_output(Path(args.log), log, PRIVATE)
        for line in SUSPENDED.findall(log):
            print(f"all processes were suspended: {line}")
        complaints = complaints_of(log)
        faults.update(line for line in complaints if killer is None or not EXPECTED.search(line))
        if killer is not None:
            faults.update(killer.faults)
            for name, pauses_s in killer.pauses_s.items():
                if pauses_s:
                    print(f"{name}: {len(pauses_s)} kills, ready again after {median(pauses_s):.2f} s (median)")
    faults.update(f"{name} is still there" for name, pid in server.pids.items() if psutil.pid_exists(pid))
    seen = {
        "probes": load.num_probes,
        "preemptions": counts.num_preemptions,
        "blocks swapped out": counts.num_blocks_swapped_out,
        "blocks swapped in": counts.num_blocks_swapped_in,
        "forks": counts.num_forks,
        "cached prompt tokens": counts.num_cached_tokens,
        "prompt tokens": counts.num_prompt_tokens,
        "output tokens": counts.num_output_tokens,
        "steps": counts.num_steps,
    }
    print(f"requests: {dict(load.outcomes)}")
    print(", ".join(f"{value:,} {name}" for name, value in seen.items()))
    for words, count in faults.most_common(MAX_SHOWN):
        print(f"FAULT: {count} × {words}")
    print("no faults" if not faults else f"{faults.total()} faults of {len(faults)} kinds")
    return {
        "minutes": args.minutes,
        "seed": args.seed,
        "set": args.set,
        "outcomes": dict(load.outcomes),
        "faults": dict(faults),
        "counts": seen,
        "memory": msgspec.to_builtins(memory),
        "samples": msgspec.to_builtins(watch.samples),
    }


def complaints_of(log: str) -> list[str]:
    """Lines of a server's log that report an error: `10:31:07.120 E schedule.0 …`, or the start of a traceback."""
    return [f"log: {line}" for line in log.splitlines() if re.match(r"[\d:.]+ [EC] | *Traceback ", line)]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
