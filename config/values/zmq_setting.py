"""What `gateway.zmq` may say."""

import ipaddress

OFF = "off"
AUTO = "auto"
MAX_NAME_BYTES = 104
"""Of a Unix socket's 107, with room for a replica's number."""


def problem_of(setting: str) -> str:
    """What is wrong with a value of `gateway.zmq`, beginning with the key; empty where nothing is."""
    if setting in (OFF, AUTO):
        return ""
    scheme, _, rest = setting.partition("://")
    match scheme:
        case "ipc" if rest.removeprefix("@"):
            if len(rest.encode()) <= MAX_NAME_BYTES:
                return ""
            return (
                f"gateway.zmq: a Unix socket's name has at most {MAX_NAME_BYTES} bytes, this one {len(rest.encode())}"
            )
        case "tcp":
            host, _, port = rest.rpartition(":")
            if host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535:
                return ""
    return f"gateway.zmq: must be 'auto', 'off', 'ipc://path', 'ipc://@name' or 'tcp://host:port', got {setting!r}"


def is_open_to_others(setting: str) -> bool:
    """Whether other machines can reach it, or may be able to: a name other than localhost can mean anything."""
    if not setting.startswith("tcp://"):
        return False
    host = setting.removeprefix("tcp://").rpartition(":")[0]
    try:
        return host != "localhost" and not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True
