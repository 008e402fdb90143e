"""The message if no server answers, with the command that starts one."""

from urllib.parse import urlsplit

from pipeline.cli.option_types import DEFAULT_PORT

HTTP_PORT, HTTPS_PORT = 80, 443
ANY_HOST = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
START_ONE = "start one with `pipeline serve MODEL`"


def no_server(url: str, reason: str = "") -> str:
    """The message if nothing answers at an address. `reason` is the operating system's."""
    host, port = host_and_port(url)
    why = f" ({reason})" if reason else ""
    if host not in LOOPBACK:
        return f"no server at {url}{why}; start one there with `pipeline serve MODEL --host {host} --port {port}`"
    again = "" if port == DEFAULT_PORT else f" --port {port}"
    return f"no server at {url}{why}; start one with `pipeline serve MODEL{again}`"


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of an address; an empty host and 0 for an empty address."""
    if not url:
        return "", 0
    parts = urlsplit(url)
    default = HTTPS_PORT if parts.scheme == "https" else HTTP_PORT
    return parts.hostname or "", parts.port or default
