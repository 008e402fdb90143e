"""One or two requests make a stage crash again and again, by a signal in the middle of its work on many requests: they
alone fail, within the default limit of restarts. Their neighbours receive exactly what they would have received, also
those of another gateway."""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.recovery_streams import STORY, Ledger, requests, run
from tests.e2e.server import Server
from tests.e2e.zmq_streams import connected

pytestmark = pytest.mark.usefixtures("smollm2_dir")

NEIGHBOURS = ("greedy", "seeded", "penalties", "stop string", "n = 3", "logprobs", "JSON schema", "echo")
MAX_TOKENS, NEIGHBOUR_TOKENS = 40, 60
NUM_BEFORE = 5
"""Output ids of the poisoned request before it kills."""
SEEDS = {"schedule": (666, 668), "detokenize": (667,), "execute": (669, 670)}
"""Of the requests that kill a stage. Those of one stage run at the same time."""

POISON = f"""
import importlib.abc, importlib.util, os, signal, sys

def die():
    os.kill(os.getpid(), signal.SIGSEGV)

def poison_schedule(module):
    really = module.Settlement.settle
    def settle(self, result):
        really(self, result)
        rows = self._rows
        for row in rows.order.tolist():
            is_poison = rows.sequences[row].request.options.seed in {SEEDS["schedule"]}
            if is_poison and rows.num_tokens[row] >= rows.num_prompt[row] + {NUM_BEFORE}:
                die()
    module.Settlement.settle = settle

def poison_detokenize(module):
    really = module.OutputSequence.settle
    def settle(self, start, ids, finish):
        if self.options.seed in {SEEDS["detokenize"]} and start + len(ids) > {NUM_BEFORE}:
            die()
        return really(self, start, ids, finish)
    module.OutputSequence.settle = settle

def poison_execute(module):
    table = module.RowTable
    set_sampling, append_ids = table._set_sampling, table.append_ids
    seeds = {{}}
    def set_seed(self, row, index, options, eos_ids):
        seeds[row] = options.seed
        set_sampling(self, row, index, options, eos_ids)
    def append(self, rows, ids):
        for row in rows.tolist():
            if seeds.get(row) in {SEEDS["execute"]} and self.num_ids[row] >= self.num_prompt[row] + {NUM_BEFORE}:
                die()
        return append_ids(self, rows, ids)
    table._set_sampling, table.append_ids = set_seed, append

POISONS = {{
    "pipeline.stages.execute.rows": poison_execute,
    "pipeline.stages.schedule.settlement": poison_schedule,
    "pipeline.stages.detokenize.output_processor": poison_detokenize,
}}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in POISONS:
            return None
        poison = POISONS.pop(name)
        spec = importlib.util.find_spec(name)
        really = spec.loader.exec_module
        def exec_module(module):
            really(module)
            poison(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize`. The stages die with work on other requests behind them in the same loop."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("poison")
    (folder / "sitecustomize.py").write_text(POISON)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Server("gateway.replicas=2", "log_level=debug", environ={"PYTHONPATH": os.pathsep.join(paths)}) as server:
        yield server


def send(server: Server, seed: int) -> tuple[int, Any]:
    """A whole reply with this seed."""
    body = json.dumps({"prompt": STORY, "max_tokens": MAX_TOKENS, "seed": seed, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def everyone(server: Server, poisons: tuple[int, ...] = ()) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What the neighbours receive over HTTP and ZeroMQ, and requests with the seeds `poisons`, which come when all
    others run."""
    ledger, have_begun = Ledger(), asyncio.Event()
    ledger.on_event(lambda number: have_begun.set() if number >= MAX_TOKENS else None)
    streams = {kind: one for kind, one in requests(NEIGHBOUR_TOKENS).items() if kind in NEIGHBOURS}
    async with connected(server.zmq) as clients, asyncio.TaskGroup() as tasks:
        over_http = tasks.create_task(run(server.url, streams, ledger))
        over_zmq = tasks.create_task(clients.run())
        await have_begun.wait()
        replies = await asyncio.gather(*(asyncio.to_thread(send, server, seed) for seed in poisons))
    return over_http.result(), over_zmq.result(), replies


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> tuple[dict[str, Any], dict[str, Any], Any]:
    return asyncio.run(everyone(server))


@pytest.mark.parametrize("stage", SEEDS)
def test_requests_that_kill_a_stage_fail_alone(server: Server, undisturbed: Any, stage: str) -> None:
    over_http, over_zmq, replies = asyncio.run(everyone(server, SEEDS[stage]))
    for status, reply in replies:
        error = reply["error"]
        assert status == 500, reply
        assert error["code"] == "stage_died", reply
        assert f"{stage} died " in error["message"] and error["message"].endswith(" while it worked on this request")
    assert len(over_http) == len(NEIGHBOURS)
    for received, expected in ((over_http, undisturbed[0]), (over_zmq, undisturbed[1])):
        for kind, value in expected.items():
            assert received[kind] == value, kind
    server.until(lambda health: health["status"] == "ok")
    server.until_idle()
    server.look()
    num_deaths = sum(f"{stage}.0 died: was killed by SIGSEGV" in line for line in server.lines)
    assert 2 <= num_deaths <= 4 * len(SEEDS[stage])
    assert send(server, 1)[0] == 200
