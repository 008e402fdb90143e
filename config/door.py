"""What `gateway.zmq` may say."""

OFF = "off"
AUTO = "auto"
MAX_NAME_BYTES = 104
"""Of a Unix socket's 107, with room for a replica's number."""
LOOPBACK = ("127.", "localhost:", "[::1]:")


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
    """Whether other machines can reach it."""
    return setting.startswith("tcp://") and not setting.removeprefix("tcp://").startswith(LOOPBACK)
