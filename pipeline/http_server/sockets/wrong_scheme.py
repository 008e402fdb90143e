"""Clients that speak HTTP to a port with TLS, or TLS to a port without. The first read tells.

Without an answer, the one sees an empty reply and the other a strange error of its TLS library, and the log nothing.
"""

import contextlib
import json
import logging
import socket
import time

LINE_EVERY_S = 60.0
"""A client may repeat it as fast as it can, so the lines are bounded; each has the number of connections since the
last."""
_TLS_HANDSHAKE = b"\x16\x03"
_METHODS = (b"GET ", b"POST ", b"HEAD ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"PRI ", b"CONNECT ")
_MOST_READ = 64 * 1024
_WORDS = "this port speaks HTTPS: use an address that begins with https://"
_BODY = json.dumps({"error": {"message": _WORDS, "type": "invalid_request_error", "param": None, "code": None}})
REPLY = (
    "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    f"Content-Length: {len(_BODY)}\r\n\r\n{_BODY}"
).encode()


class WrongScheme:
    """Looks at what the connections of one listener send first."""

    def __init__(self, has_tls: bool) -> None:
        self._has_tls = has_tls
        self._num = 0
        self._next_line_s = 0.0

    def is_refused(self, connection: socket.socket) -> bool:
        """Whether a client that does not speak TLS got an answer in words; the caller then closes the connection. One
        that speaks TLS where there is none is only logged: nothing that it would understand could be said."""
        try:
            first = connection.recv(8, socket.MSG_PEEK)
        except OSError:  # nothing to read, or it has left
            return False
        if self._has_tls:
            if not first.startswith(_METHODS):
                return False
            self._log("a client spoke HTTP to this port, which speaks HTTPS: it needs https:// in its address")
            with contextlib.suppress(OSError):
                connection.recv(_MOST_READ)  # what is unread when it is closed would take the reply with it
                connection.send(REPLY)
                connection.shutdown(socket.SHUT_WR)
            return True
        if first.startswith(_TLS_HANDSHAKE):
            self._log(
                "a client spoke HTTPS to this port, which speaks HTTP: it needs http:// in its address, or the server "
                "a certificate (gateway.ssl_certfile)"
            )
        return False

    def _log(self, words: str) -> None:
        self._num += 1
        if (now_s := time.monotonic()) >= self._next_line_s:
            logging.getLogger("pipeline").warning(words, extra={"fields": {"connections": self._num}})
            self._num, self._next_line_s = 0, now_s + LINE_EVERY_S
