"""Types of command-line options. Each raises ArgumentTypeError; argparse shows its message after the option's name."""

import argparse
import re
from urllib.parse import urlsplit

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|)")
DEFAULT_PORT = 8000
"""The port of `pipeline serve` if nothing else is set."""
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
MAX_PORT = 65535

_AGE = re.compile(r"(\d{1,6})([mhdw])")
_AGE_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}


def http_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"needs http:// or https:// in front, got {text!r}")
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or an invalid port
        is_whole = False
    if not is_whole or not text.isprintable():
        raise argparse.ArgumentTypeError(f"needs an address such as {DEFAULT_URL}, got {text!r}")
    return text


def port(text: str) -> int:
    value = whole_number(text, 1)
    if value > MAX_PORT:
        raise argparse.ArgumentTypeError(f"needs a port from 1 to {MAX_PORT}, got {text!r}")
    return value


def local_url(text: str) -> str:
    """The address of a server at a port of this machine."""
    return f"http://127.0.0.1:{port(text)}"


def add_server(parser: argparse._ActionsContainer, what: str, default: str | None = None) -> None:
    """Declare `--url`, `--port` and `--api-key`, for a server with the OpenAI API; `what` says which it is by
    default."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", type=http_url, default=default, help=f"a server that speaks the OpenAI API; {what}")
    where.add_argument(
        "--port", dest="url", type=local_url, metavar="PORT", help="the server at this port of this machine"
    )
    parser.add_argument("--api-key", type=api_key, help="API key, sent as a bearer token; by default $PIPELINE_API_KEY")


def api_key(text: str) -> str:
    if not text.isprintable():
        # The key is not shown, because it is a secret.
        raise argparse.ArgumentTypeError("has a line break or another character that a header can't hold")
    return text


def whole_number(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    return whole_number(text, 0)


def positive(text: str) -> int:
    return whole_number(text, 1)


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"needs a number from 0 to 2, got {text!r}")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"needs a number above 0 and at most 1, got {text!r}")
    return value


def age(text: str) -> float:
    """A time in seconds, from hours to weeks."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"needs a time such as 12h, 30d or 2w, got {text!r}")
    return int(match[1]) * _AGE_UNITS_S[match[2]]


def duration(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"needs a time such as 20s or 2m, got {text!r}")
    return seconds
