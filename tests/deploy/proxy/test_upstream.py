"""The HTTP client of the relay."""

import asyncio
import contextlib
import socket
import tracemalloc
from unittest.mock import Mock

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from pipeline.deploy.proxy.upstream import Connection, ResponseCollector, Upstream, UpstreamLost, fetch, head_of
from tests.rig import PATIENCE_S

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n,\r\n9\r\n\r\n0\r\n\r\nab\r\n0\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\n0\r\n\r\nxy"


def answer(
    data: bytes, cuts: list[int], *, closes: bool = False
) -> tuple[ResponseCollector, Connection, BaseException | None]:
    async def run() -> tuple[ResponseCollector, Connection, BaseException | None]:
        connection, sink = Connection(), ResponseCollector()
        connection.connection_made(Mock(is_closing=lambda: False, get_write_buffer_size=lambda: 0))
        done = connection.send(b"GET", sink=sink)
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if data[begin:end]:
                connection.data_received(data[begin:end])
        if closes:
            connection.connection_lost(None)
        assert done.done()
        return sink, connection, done.exception()

    return asyncio.run(run())


def test_a_request_for_a_replica_that_reads_nothing_is_not_copied():
    body = b"x" * (16 * 1024**2)

    async def sent() -> int:
        with socket.create_server(("127.0.0.1", 0)) as hung:
            upstream = Upstream("127.0.0.1", hung.getsockname()[1])
            connection = await upstream.connect()
            tracemalloc.start()
            done = connection.send(b"POST / HTTP/1.1\r\n\r\n", body, sink=ResponseCollector())
            await asyncio.sleep(0)  # uvloop writes at the end of this turn
            await asyncio.sleep(0)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert connection._transport is not None and connection._transport.get_write_buffer_size() > len(body) // 2
            connection.close()
            with pytest.raises(UpstreamLost):
                await done
            return peak

    assert uvloop.run(sent()) < len(body) // 4


async def test_a_connection_whose_request_was_refused_before_it_was_sent_whole_is_not_kept():
    writers = list[asyncio.StreamWriter]()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        upstream = Upstream(*server.sockets[0].getsockname()[:2])
        for body, is_kept in ((b"x", True), (b"x" * (64 * 1024**2), False)):
            connection, sink = await upstream.connect(fresh=True), ResponseCollector()
            async with asyncio.timeout(PATIENCE_S):
                await connection.send(b"POST / HTTP/1.1\r\n\r\n", body, sink=sink)
            assert sink.response.status == 413 and connection.is_reusable == is_kept
            upstream.give_back(connection)
            assert connection.is_open == is_kept
        upstream.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=8).map(sorted))
def test_chunks_are_joined_however_they_arrive(cuts):
    sink, connection, error = answer(CHUNKED, cuts)
    assert error is None and sink.body == b"hello,\r\n0\r\n\r\nab"
    assert sink.response.status == 200 and sink.response.get("x-a") == "b"
    assert connection.is_reusable


@given(st.lists(st.integers(0, len(SIZED)), max_size=4).map(sorted))
def test_a_body_of_known_length(cuts):
    sink, connection, error = answer(SIZED, cuts)
    assert error is None and sink.body == b"0\r\n\r\nxy" and sink.response.status == 404
    assert connection.is_reusable


@pytest.mark.parametrize("end", [0, 30, 100, len(CHUNKED) - 1])
def test_an_early_end_is_an_error(end):
    _, connection, error = answer(CHUNKED[:end], [], closes=True)
    assert isinstance(error, UpstreamLost) and not connection.is_reusable


def test_a_body_without_length_ends_with_the_connection():
    sink, _, error = answer(b"HTTP/1.1 200 OK\r\n\r\nall", [], closes=True)
    assert error is None and sink.body == b"all"


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 xx\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad\r\n\r\n"])
def test_what_is_not_http_is_an_error(data):
    assert isinstance(answer(data, [])[2], UpstreamLost)
    with pytest.raises(ValueError):
        head_of(data.removesuffix(b"\r\n\r\n"))


async def test_a_closed_port_and_a_silent_server_are_errors():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UpstreamLost, match="did not answer"):
        await fetch(Upstream("127.0.0.1", port), "/health", 0.1)
    server.close()
    await server.wait_closed()
    with pytest.raises(UpstreamLost, match=str(port)):
        await Upstream("127.0.0.1", port).connect()


async def test_a_fetch_leaves_no_connection_open():
    """Probes come every second: kept connections would fill the replica's descriptors."""
    ends = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        ends.put_nowait(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        upstream = Upstream(*server.sockets[0].getsockname())
        for _ in range(2):
            assert await fetch(upstream, "/health", 5.0) == (200, b"ok")
            async with asyncio.timeout(30.0):
                assert await ends.get() == b""
