"""Requests of all kinds begin, grow, end by themselves, fail, and lose their clients and stages, by chance.

Each ends in a bounded number of turns, or soon after it if its client is slow; what is open stays below the documented
bound, and at the end nothing is left.

With PIPELINE_ALL_CASES=1 there are 80 histories.
"""

import json
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_dtype
from pipeline.stages.gateway.admission.preemption import Preemption
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
from tests.rig import PATIENCE_S
from tests.stages.gateway.admission.test_preemption import MAX_BYTES, NUM_TOP, PIECES, WHOLE, until
from tests.stages.gateway.gate import COMPLETION, Gate

SEEDS = range(80 if os.environ.get("PIPELINE_ALL_CASES") else 6)
NUM_TURNS = 40
"""Turns in which something may happen, besides that output grows."""
MAX_OPEN = 8
MIN_IDS, MAX_IDS = 8, 24
"""Of a sequence in a turn."""
WAKE_BYTES = 3 * MAX_IDS * 4000
"""At most three sequences grow in a turn. An id with its records takes less than 4,000 bytes in a complete reply."""
BODIES: list[dict[str, Any]] = [
    WHOLE,
    WHOLE | {"n": 2, "max_tokens": 90},
    WHOLE | {"prompt": ["a", "b"], "max_tokens": 80},
    WHOLE | {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 24},
    WHOLE | {"n": 3, "max_tokens": 180, "stream": True},
    COMPLETION,
    WHOLE | {"best_of": 3, "max_tokens": 60},
    WHOLE | {"stream": True},
    WHOLE | {"prompt": ["a", "b"], "n": 2, "max_tokens": 90, "stream": True},
]
MAX_TURNS = 180 // MIN_IDS + 4
"""In which a request ends that always goes on, with the turns to be submitted again."""


class Running(msgspec.Struct):
    """A prompt request that schedule has."""

    submit: m.Submit
    num_ids: list[int]
    """Of each sequence; -1 if it has ended."""


class Client(msgspec.Struct):
    reply: "Future[Any]"
    connection: socket.socket | None
    last_turn: int
    """It must have ended by then."""


def connected(gate: Gate, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request, and ends with the response."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    connection = socket.create_connection(gate.address, timeout=PATIENCE_S)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """What a client gets until the end of a response, or until it leaves."""
    data = b""
    try:
        while more := connection.recv(1 << 20):
            data += more
    except OSError:
        pass
    return data


class History:
    """Clients, and stages that generate whatever is submitted."""

    def __init__(self, gate: Gate, seed: int) -> None:
        self.gate = gate
        self.dice = random.Random(seed)
        self.bodies = [BODIES[seed % len(BODIES)], self.dice.choice(BODIES)]
        self.running: dict[int, Running] = {}
        self.targets: dict[int, list[int]] = {}
        """The lengths of each request's sequences, the same in each attempt."""
        self.clients: list[Client] = []
        self.statuses: set[int] = set()
        self.turn = 0

    def run(self) -> None:
        """A history, until all its requests have ended by themselves."""
        for _ in range(NUM_TURNS):
            self.dice.choice([self.begin] * 6 + [self.leave, self.die, lambda: None])()
            self.generate()
            self.look()
        while self.clients:
            self.generate()
            self.look()

    def is_over(self, found: dict[str, int]) -> bool:
        """Whether nothing is open, by /load. The gateway may still have to notice that a client has left: until then
        the stages go on."""
        self.generate()
        return not any(found[f"open_{what}"] for what in ("bytes", "sequences", "tokens"))

    # ----------------------------------------------------------------------------------------------------- what happens

    def begin(self) -> None:
        if len(self.clients) >= MAX_OPEN:
            return
        body, connection = self.dice.choice(self.bodies), None
        if self.dice.random() < 0.3:
            connection = connected(self.gate, body)
            reply = self.gate.do(read_all, connection)
        else:
            reply = self.gate.complete(body)
        # Older requests may end before it; and while clients read their replies, the oldest may have to begin again.
        last_turn = self.turn + 3 * MAX_TURNS * (len(self.clients) + 1)
        self.clients.append(Client(reply, connection, last_turn))

    def leave(self) -> None:
        for client in self.clients:
            if client.connection is not None:
                client.connection.shutdown(socket.SHUT_RDWR)
                self.clients.remove(client)
                client.reply.result(PATIENCE_S)
                client.connection.close()
                return

    def die(self) -> None:
        name = self.dice.choice(["schedule.0", "ingest.0", "detokenize.0"])
        if name == "schedule.0":
            self.running.clear()
        # What detokenize had sent and the gateway had not read, schedule would send again to the next one.
        self.gate.rig.load()
        self.gate.rig.restart(name)

    # ------------------------------------------------------------------------------------------------------- the stages

    def receive(self) -> None:
        """What ingest and schedule got."""
        self.gate.rig.load()
        while not self.gate.rig.nothing("ingest", 0.0):
            message = self.gate.rig.receive("ingest")
            if isinstance(message, m.Submit):
                self.admit(message)
        while not self.gate.rig.nothing("schedule", 0.0):
            message = self.gate.rig.receive("schedule")
            one = self.running.get(message.request_id)
            if one is None or one.submit.attempt != message.attempt:
                continue
            if isinstance(message, m.Abort):
                self.end_all(one, m.Finish.ABORT)
            del self.running[message.request_id]

    def admit(self, submit: m.Submit) -> None:
        options = submit.options
        if submit.attempt == 1 and self.dice.random() < 0.05:
            self.gate.reject(submit, m.Failure(400, "no"))
            return
        most = options.max_tokens or 16
        self.targets.setdefault(submit.request_id, [self.dice.randint(most // 2, most) for _ in range(options.n)])
        num_ids = [len(bytes(ids)) // 4 for ids in submit.outputs] or [0] * options.n  # type: ignore[arg-type]
        for index, num in enumerate(num_ids):
            self.gate.continue_at(submit, num, num, index)
        self.running[submit.request_id] = Running(submit, num_ids)
        self.gate.accept(submit)

    def generate(self) -> None:
        """A turn: the output of each request grows, in a turn of its own."""
        self.turn += 1
        self.receive()
        for one in self.dice.sample(list(self.running.values()), len(self.running)):
            if self.running.get(one.submit.request_id) is not one:
                continue  # it was withdrawn, or submitted again
            if self.dice.random() < 0.01:
                self.end_all(one, m.Finish.ERROR)
            for index, target in enumerate(self.targets[one.submit.request_id]):
                self.grow(one, index, target)
            self.receive()

    def grow(self, one: Running, index: int, target: int) -> None:
        num_before = one.num_ids[index]
        if num_before >= 0:
            num_more = min(self.dice.randint(MIN_IDS, MAX_IDS), target - num_before)
            is_over = num_before + num_more == target
            one.num_ids[index] = -1 if is_over else num_before + num_more
            self.delta(one.submit, index, num_more, m.Finish.LENGTH if is_over else m.Finish.NONE)

    def end_all(self, one: Running, finish: m.Finish) -> None:
        for index, num_ids in enumerate(one.num_ids):
            if num_ids >= 0:
                one.num_ids[index] = -1
                self.delta(one.submit, index, 0, finish)

    def delta(self, submit: m.Submit, index: int, num_ids: int, finish: m.Finish) -> None:
        token_outputs, pieces = b"", None
        if submit.options.num_logprobs >= 0 and num_ids:
            token_outputs, pieces = np.zeros(num_ids, logprob_dtype(NUM_TOP)).tobytes(), PIECES * num_ids
        self.gate.delta(
            submit,
            "t" * num_ids,
            num_ids,
            index=index,
            finish=finish,
            token_outputs=token_outputs,
            pieces=pieces,
            error="no",
        )

    # ---------------------------------------------------------------------------------------------------- what they get

    def look(self) -> None:
        """Which clients have got their replies."""
        for client in list(self.clients):
            # The stages have done their part by the last turn. But on a busy machine a client may still have to send
            # its request, or to read, while others have to begin again.
            end = time.monotonic() + PATIENCE_S
            while self.turn > client.last_turn and not client.reply.done():
                assert time.monotonic() < end, "it does not end"
                self.generate()
            if client.reply.done():
                reply = client.reply.result()
                self.statuses.add(int(reply[9:12]) if isinstance(reply, bytes) else reply.status_code)
                self.clients.remove(client)
                if client.connection is not None:
                    client.connection.close()


class Watch:
    """Notes what is preempted, and checks the account after each decision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.preempted: Counter[str] = Counter()
        """By the kind of request."""
        self.num_most = 0
        preempt, update = Preemption.preempt, Preemption._update

        def noted(preemption: Preemption, one: PromptRequest) -> None:
            parsed = one.request.parsed
            kind = "several" if parsed.num_sequences > 1 else "one"
            if len(one.request.prompt_requests) > 1:
                kind = "list of"
            self.preempted[f"{kind}, {'stream' if parsed.stream else 'whole'}"] += 1
            preempt(preemption, one)

        def checked(preemption: Preemption) -> None:
            update(preemption)
            admission = preemption._table.admission
            self.num_most = max(self.num_most, admission.num_bytes)
            if admission.num_bytes > admission.max_bytes:
                oldest = preemption._oldest()
                others = [one for one in preemption._running() if one.request is not oldest and one.num_output_bytes]
                assert not others, "others run although the limit is reached"

        monkeypatch.setattr(Preemption, "preempt", noted)
        monkeypatch.setattr(Preemption, "_update", checked)


def test_each_request_ends_and_everything_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch(monkeypatch)
    statuses: set[int] = set()
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        with Gate(folder, max_open_bytes=MAX_BYTES) as gate:
            history = History(gate, seed)
            history.run()
            until(gate, history.is_over)
            statuses |= history.statuses
    assert statuses <= {200, 400, 500, 503} and 200 in statuses
    assert "output is missing" not in caplog.text
    assert watch.num_most <= MAX_BYTES + MAX_BYTES * 3 // 4 + WAKE_BYTES, "more than docs/security.md says"
    expected = {"one, whole", "several, whole", "list of, whole"}
    assert watch.preempted.keys() >= expected, "the histories test less than they should"
