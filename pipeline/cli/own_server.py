"""A server that a command starts for itself, on a free port of this machine."""

import msgspec

from pipeline.client.embedded.server import EmbeddedServer
from pipeline.client.embedded.server_log import http_address
from pipeline.client.progress import StartStatus
from pipeline.config.settings import Settings
from pipeline.errors import StartError

LOOK_S = 0.1
"""Interval at which the log of a starting server is read."""


def own_settings(settings: Settings) -> Settings:
    """Settings of a private server. Its log must say when it is ready."""
    gateway = msgspec.structs.replace(settings.gateway, host="127.0.0.1", port=0, api_keys_file="")
    return msgspec.structs.replace(settings, gateway=gateway, log_level="info")


def started(own: EmbeddedServer) -> str:
    """Wait until the server is ready. Returns its address. Raises StartError."""
    with StartStatus(progress=True) as status:
        while (url := http_address(own.log())) is None:
            status.say(own.last_line())
            if own.wait(LOOK_S):  # the server has its own deadlines, and ends when one passes
                raise StartError(f"the server can't start: {own.reason()}")
    return url
