"""The listeners of a gateway: for clients over HTTP and over ZeroMQ, and the admin listener."""

import asyncio

from pipeline.client.connection.zmq_address import address_of
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.listener import HttpListener
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.http.app import Api
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.zmq.bind import until_free
from pipeline.stages.gateway.zmq.server import ZmqServer
from pipeline.stages.gateway.zmq.serving.model import Choose


class Listeners:
    """Owns them. There are none in a replay, and none of its own if several models share a process."""

    def __init__(
        self,
        stage: "Stage[m.GatewayInbox]",
        requests: RequestTable,
        api: Api,
        choose: Choose,
        rejection_log: RejectionLog,
        access_log: AccessLog | None,
    ) -> None:
        """`choose` finds the model of a connection over ZeroMQ."""
        self._stage, self._requests, self._api = stage, requests, api
        self._choose = choose
        self._rejection_log, self._access_log = rejection_log, access_log
        self._http: list[HttpListener] = []
        """That for clients, then the admin listener."""
        self._http_port = 0
        self.zmq: ZmqServer | None = None

    @property
    def have_http(self) -> bool:
        return bool(self._http)

    async def start_http(self) -> None:
        """Accept connections of HTTP clients."""
        launch, requests = self._stage.launch, self._requests
        self._http_port, self._http = self._api.listeners(
            *(launch, self._stage.settings, requests.accounts.keys, requests.unread),
            self._rejection_log,
            self._access_log,
        )
        for listener in self._http:
            await listener.start()

    async def start_zmq(self, tasks: asyncio.TaskGroup) -> None:
        """Accept ZeroMQ clients. Raises UserError if it can't listen on the address."""
        settings, requests = self._stage.settings.gateway, self._requests
        if (address := self._zmq_address) is not None:
            self.zmq = ZmqServer(
                address,
                self._choose,
                requests.accounts,
                settings.max_body_bytes,
                tasks,
                requests.unread,
                requests.accounts.keys,
                needs_key=address.startswith("tcp://"),  # only processes of this user can connect to ipc
                addresses=self._zmq_addresses(),
                gateway=self._stage.replica,
                access_log=self._access_log,
            )
            await self.zmq.start()

    async def take_over(self, tasks: asyncio.TaskGroup) -> None:
        """Listen at the sockets of the server that this one replaces, and at its ZeroMQ address when it has left."""
        await self.start_http()
        if (address := self._zmq_address) is not None:
            await until_free(address)
            await self.start_zmq(tasks)

    async def leave(self) -> None:
        """Another server listens at these sockets from now on."""
        if self.zmq is not None:
            self.zmq.leave()
        for listener in self._http:
            await listener.stop()

    async def stop_http(self) -> None:
        """Accept no more connections of clients over HTTP."""
        if self._http:
            await self._http[0].stop()

    def rescaled(self) -> None:
        """The number of gateways has changed."""
        if self.zmq is not None:
            self.zmq.addresses = self._zmq_addresses()

    async def close(self) -> None:
        """Close all connections."""
        if self.zmq is not None:
            self.zmq.close()
        for listener in self._http:
            await listener.cleanup()
        if self.zmq is not None:
            await self.zmq.wait_closed()

    @property
    def _zmq_address(self) -> str | None:
        """None if gateway.zmq is off."""
        return address_of(self._stage.settings.gateway.zmq, self._http_port, self._stage.replica)

    def _zmq_addresses(self) -> list[str]:
        """Of all gateways; empty if gateway.zmq is off."""
        settings = self._stage.settings.gateway
        # The port of another gateway of this server is the same: they share it.
        addresses = [address_of(settings.zmq, self._http_port, each) for each in range(settings.replicas)]
        return [one for one in addresses if one is not None]
