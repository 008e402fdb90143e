"""What the ZeroMQ server logs of requests that are over and of connections that it ends."""

import asyncio
import logging
from collections import Counter

from pipeline.http_server.access_log import AccessLog
from pipeline.stages.gateway.access_details import log_zmq
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.zmq.peer import ClientPeer
from pipeline.stages.gateway.zmq.stream import ZmqStream

LINE_S = 1.0
"""Shortest time between log lines about connections that were ended for others."""


class ServerLog:
    """For one server."""

    def __init__(self, access_log: AccessLog | None) -> None:
        self._access_log = access_log
        self._loop = asyncio.get_running_loop()
        self._log = logging.getLogger("pipeline")
        self._num_ended: Counter[str] = Counter()
        """Connections that were ended for others and are not in the log yet, by reason."""
        self._next_line_s = 0.0

    def over(
        self,
        peer: ClientPeer,
        begin_s: float,
        request_id: str,
        error: ApiError | None,
        stream: ZmqStream | None = None,
    ) -> None:
        """A request is over, or was refused."""
        if self._access_log is not None:
            request = None if stream is None else stream.request
            has_left = stream is not None and not stream.has_ended
            took_s, client = self._loop.time() - begin_s, peer.connection.address
            log_zmq(self._access_log, request, request_id, error, peer.scope, client, took_s, has_left=has_left)

    def ended(self, why: str) -> None:
        """A connection was ended for others. At most a line per second."""
        self._num_ended[why] += 1
        if (now_s := self._loop.time()) >= self._next_line_s:
            self._next_line_s = now_s + LINE_S
            for reason, num in self._num_ended.items():
                self._log.warning("ended connections of clients", extra={"fields": {"num": num, "why": reason}})
            self._num_ended.clear()
