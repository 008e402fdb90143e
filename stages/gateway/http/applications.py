"""The HTTP applications of a gateway, one for clients and one for the operator, and the listeners that serve them."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.config.settings import Settings
from pipeline.http_server import expect
from pipeline.http_server.access.cors import Cors
from pipeline.http_server.access.guard import OPEN_PATHS
from pipeline.http_server.access.key_accounts import add_limit_headers
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.listener import HttpListener
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.http_server.rules import ListenerRules
from pipeline.http_server.server_header import add_headers
from pipeline.http_server.sockets.connections import HttpConnections, limit_of
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.security.api_keys import Keys
from pipeline.runtime.security.tls import server_context
from pipeline.stages.gateway.http import middleware
from pipeline.stages.gateway.http.route import Route
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.page import files
from pipeline.stages.gateway.zmq.listener import max_connections as max_zmq_connections

Prepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


class Applications(ABC):
    """All routes, with the handlers of a subclass."""

    def __init__(self, settings: GatewaySettings, *, has_keys: bool) -> None:
        """`has_keys`: clients need an API key."""
        self._max_body = settings.max_body_bytes
        self._has_page = settings.page
        self._has_keys = has_keys
        self.cors = Cors(settings)

    @abstractmethod
    def handler(self, route: Route) -> Handler:
        """What answers the requests of a route."""

    def expect_handler(self, route: Route) -> Any:
        """What answers the `Expect` header of a route's requests."""
        return expect.answer_expect

    def own_routes(self, is_admin: bool) -> Sequence[web.RouteDef]:
        """Routes for clients, or for the operator, besides those of ROUTES."""
        return ()

    def on_prepare(self) -> Sequence[Prepare]:
        """What is called before the head of each response is sent."""
        return ()

    def app(self, has_admin_routes: bool = True) -> web.Application:
        """For clients: all routes, with or without those of `admin_app`."""
        app = self._empty()
        if self.cors.is_on:
            app.on_response_prepare.append(self._add_cors_headers)
        app.add_routes(self._routes(is_admin=False))
        if self._has_page:
            app.add_routes(files.routes())
        if has_admin_routes:
            app.add_routes(self._routes(is_admin=True))
        return app

    def admin_app(self) -> web.Application:
        """For the operator's programs, which have no key."""
        app = self._empty()
        app.add_routes(self._routes(is_admin=True))
        return app

    def _empty(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[middleware.format_errors])
        app.on_response_prepare.append(add_headers)
        if self._has_keys:
            app.on_response_prepare.append(add_limit_headers)
        app.on_response_prepare.extend(self.on_prepare())
        return app

    async def _add_cors_headers(self, http_request: web.Request, response: web.StreamResponse) -> None:
        self.cors.add_headers(http_request, response)

    def _routes(self, is_admin: bool) -> list[web.RouteDef]:
        return [*(self._def_of(route) for route in ROUTES if route.is_admin == is_admin), *self.own_routes(is_admin)]

    def _def_of(self, route: Route) -> web.RouteDef:
        options: dict[str, Any] = {"allow_head": True} if route.method == "GET" else {}
        add = {"GET": web.get, "POST": web.post, "DELETE": web.delete}[route.method]
        return add(route.resource, self.handler(route), expect_handler=self.expect_handler(route), **options)

    def listeners(
        self,
        launch: m.Launch,
        settings: Settings,
        keys: Keys | None,
        unread: UnreadReplies,
        rejection_log: RejectionLog,
        access_log: AccessLog | None,
    ) -> tuple[int, list[HttpListener]]:
        """The port, and the listeners on the launch's sockets: the one for clients, then the admin listener if there is
        one. `unread` is shared by both."""
        gateway = settings.gateway
        has_admin = launch.admin_fd >= 0
        tls = server_context(gateway)
        page_paths = files.paths() if self._has_page else ()
        rules = ListenerRules.main(
            gateway,
            rejection_log,
            keys=keys,
            open_paths=frozenset((*(() if has_admin else OPEN_PATHS), *page_paths)),
            cors=self.cors,
            access_log=access_log,
            scheme="http" if tls is None else "https",
        )
        shared: dict[str, Any] = {
            "max_header_bytes": settings.limits.max_header_bytes,
            "connections": HttpConnections(limit_of(topology.max_open_of_one(settings), max_zmq_connections())),
            "unread": unread,
        }
        sock = socket.socket(fileno=launch.listen_fd)
        port = sock.getsockname()[1]
        found = [HttpListener(self.app(has_admin_routes=not has_admin), sock, rules, tls=tls, **shared)]
        if has_admin:
            rules = ListenerRules.admin(gateway, rejection_log, access_log)
            found.append(HttpListener(self.admin_app(), socket.socket(fileno=launch.admin_fd), rules, **shared))
        return port, found
