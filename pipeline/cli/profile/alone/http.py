"""Streaming chat clients of a gateway that discard what they read.

They count tokens, or any other mark, and detect the end of a stream by the end of the HTTP response. Each keeps its
connection for many requests, like SDKs.
"""

import json
import selectors
import socket
from typing import Any

import zmq

from pipeline.errors import UserError

END = b"0\r\n\r\n"
READ_BYTES = 1 << 18


class Sink:
    """`num_streams` clients. `read` takes what has arrived. `open_calls` sends a new request for each that has its
    answer."""

    def __init__(
        self,
        address: tuple[str, int],
        model: str,
        num_streams: int,
        num_output: int,
        *,
        mark: bytes = b"",
        poller: "zmq.Poller | None" = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": num_output,
            "stream": True,
            "temperature": 0,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._request = head.encode() + data
        self._mark = mark
        self._buffer = bytearray(READ_BYTES)
        self._idle: list[socket.socket] = []
        self._tails: dict[socket.socket, bytes] = {}
        self.num_tokens = 0
        """How often the mark has arrived."""
        self.num_bytes = 0
        self.num_calls = 0
        for _ in range(num_streams):
            one = socket.create_connection(address, timeout=10)
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
            self._idle.append(one)
        if poller is not None:
            poller.register(self._selector.fileno(), zmq.POLLIN)

    def open_calls(self) -> None:
        for one in self._idle:
            one.sendall(self._request)
            self._tails[one] = b""
        self._idle = []

    def read(self, timeout_s: float = 0) -> None:
        view = memoryview(self._buffer)
        for key, _ in self._selector.select(timeout_s):
            one: Any = key.fileobj
            size = one.recv_into(self._buffer)
            if not size:
                raise ConnectionError("the gateway has closed a connection")
            self.num_bytes += size
            if self._mark:
                self.num_tokens += bytes(view[:size]).count(self._mark)
            if not self._tails[one] and bytes(view[:9]) == b"HTTP/1.1 " and bytes(view[9:12]) != b"200":
                raise UserError(f"the gateway answered {bytes(view[:size]).decode(errors='replace')}")
            tail = self._tails[one] + bytes(view[max(0, size - len(END)) : size])
            self._tails[one] = tail[-len(END) :]
            if self._tails[one] == END:
                self._idle.append(one)
                self.num_calls += 1

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
