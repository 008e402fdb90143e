"""No API key takes all of the room for large bodies, or all turns of their parsing."""

import asyncio
import functools
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.http_server.bodies import body_reader, upload_budget
from pipeline.http_server.bodies.large_body_lock import LargeBodyLock
from pipeline.http_server.bodies.upload_budget import NUM_BODIES, SMALL_BYTES, UploadBudget
from pipeline.stages.gateway.errors import ApiError
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.http.uploads.test_uploads import LARGE, MAX_BODY, is_readable, is_refused
from tests.stages.gateway.http.uploads.test_uploads import send as send_body


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


class TestShares:
    def test_a_scope_below_its_share_gets_room_from_the_one_with_most(self) -> None:
        room = UploadBudget(MAX_BODY)
        stopped: list[str] = []
        of_a = [room.upload(functools.partial(stopped.append, f"a{index}"), "a") for index in range(NUM_BODIES)]
        for upload in of_a:
            upload.grow(MAX_BODY)
            upload.complete()
        of_b = [room.upload(functools.partial(stopped.append, f"b{index}"), "b") for index in range(NUM_BODIES)]
        for upload in of_b[: NUM_BODIES // 2]:
            room.check_room(MAX_BODY, "b")
            upload.grow(MAX_BODY)
        assert stopped == [f"a{index}" for index in range(NUM_BODIES - 1, NUM_BODIES // 2 - 1, -1)], "the last ones"
        for refuse in (
            lambda: room.check_room(MAX_BODY, "b"),
            lambda: of_b[-1].grow(MAX_BODY),
            lambda: room.check_room(MAX_BODY, "a"),
        ):
            with pytest.raises(ApiError):
                refuse()  # both have their half
        room.upload(pytest.fail, "c").grow(MAX_BODY)
        assert len(stopped) == NUM_BODIES // 2 + 1 and room.num_bytes == room.max_bytes
        for upload in (*of_a, *of_b):
            upload.release()
        assert room.num_bytes == MAX_BODY

    def test_a_body_that_fits_takes_nothing_from_others(self) -> None:
        room = UploadBudget(MAX_BODY)
        for _ in range(NUM_BODIES - 1):
            room.upload(pytest.fail, "a").grow(MAX_BODY)
        room.upload(pytest.fail, "b").grow(MAX_BODY)
        assert room.num_bytes == room.max_bytes

    def test_another_key_s_bodies_are_read_while_one_key_fills_the_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(upload_budget, "GRACE_S", PATIENCE_S)  # no body is slow
        with locked(tmp_path, max_body_bytes=MAX_BODY) as gate, ExitStack() as stack:
            connections = [stack.enter_context(stuck(gate, KEY)) for _ in range(NUM_BODIES)]
            gate.rig.until(lambda _: is_refused(send_body(gate, LARGE, **key(KEY))))
            assert send_body(gate, LARGE, **key(SECOND)).status_code == 404
            gate.rig.until(lambda _: any(map(is_readable, connections)))
            (given_up,) = [one for one in connections if is_readable(one)]
            answer = read_until(given_up, b"}}")
            assert answer.startswith(b"HTTP/1.1 503 ") and b"needed the room of this body" in answer


def stuck(gate: Gate, value: str) -> socket.socket:
    """A connection that sends most of a body and then stalls."""
    connection = socket.create_connection(gate.address, timeout=PATIENCE_S)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {value}\r\n"
        f"Expect: 100-continue\r\nContent-Length: {MAX_BODY}\r\n\r\n"
    )
    connection.sendall(head.encode())
    read_until(connection, b"\r\n\r\n")
    connection.sendall(b" " * (MAX_BODY - 100))
    return connection


class TestTurns:
    async def test_another_scope_s_body_and_smaller_ones_go_before_many_large_ones(self) -> None:
        lock, order = LargeBodyLock(), list[str]()

        async def parse(name: str, num_bytes: int, scope: str) -> None:
            async with lock.hold(num_bytes, scope):
                order.append(name)

        flood = [asyncio.create_task(parse("a", 4 * 1024**2, "a")) for _ in range(10)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(parse("b", 4 * 1024**2, "b")), asyncio.create_task(parse("small", 70_000, "a"))]
        await asyncio.gather(*flood, *others)
        assert order.index("b") <= 2 and order.index("small") <= 3, order

    async def test_a_turn_comes_after_a_pause_and_a_cancelled_wait_takes_none(self) -> None:
        lock = LargeBodyLock()
        async with lock.hold(SMALL_BYTES + 1):
            waits = asyncio.create_task(lock.hold(SMALL_BYTES + 1).__aenter__())
            await asyncio.sleep(0.05)
            assert not waits.done()
            waits.cancel()
        async with asyncio.timeout(PATIENCE_S), lock.hold(SMALL_BYTES + 1):
            pass

    def test_the_wait_for_a_turn_has_a_deadline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(body_reader, "TURN_TIMEOUT_S", 0.1)
        with Gate(tmp_path, max_body_bytes=MAX_BODY) as gate, monkeypatch.context() as patch:

            async def endless(*_: object) -> None:
                await asyncio.Event().wait()

            patch.setattr("pipeline.runtime.queues.fair_gate.FairGate.enter", endless)
            response = send_body(gate)
            assert response.status_code == 503 and "other large bodies were parsed" in response.text
            patch.undo()
            monkeypatch.setattr(body_reader, "TURN_TIMEOUT_S", PATIENCE_S)
            assert send_body(gate).status_code == 404

    def test_the_wait_for_a_turn_ends_with_the_request_s_own_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Gate(tmp_path, max_body_bytes=MAX_BODY, request_timeout_s=0.2) as gate, monkeypatch.context() as patch:

            async def endless(*_: object) -> None:
                await asyncio.Event().wait()

            patch.setattr("pipeline.runtime.queues.fair_gate.FairGate.enter", endless)
            for _ in range(NUM_BODIES + 1):  # each returns its room
                response = send_body(gate)
                assert response.status_code == 504 and "0.2 s" in response.text
