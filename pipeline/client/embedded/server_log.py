"""What the log of a server says to whoever started it. Lines are those of logs.py, in either of its forms; others are
of libraries, and of tracebacks."""

import re
from typing import NamedTuple

import msgspec

ERROR = "error"
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": ERROR, "C": "critical"}
_TEXT = re.compile(r"^\d\d:\d\d:\d\d\.\d+ ([A-Z]) (\S+) (.*)$")
_READY = re.compile(r'ready on (http://[^\s"]+)')
_COMMAND = "pipeline: error: "
"""How the command line begins what it has to say."""


class LogLine(NamedTuple):
    """One event."""

    level: str
    stage: str
    """As `schedule.0`."""
    text: str


class _JsonLine(msgspec.Struct):
    level: str
    stage: str
    message: str


_json: msgspec.json.Decoder[_JsonLine] = msgspec.json.Decoder(_JsonLine)


def parsed(line: str) -> LogLine | None:
    """A line as an event; None where it is none."""
    if match := _TEXT.match(line):
        return LogLine(_LEVELS.get(match[1], match[1]), match[2], match[3])
    if line.startswith("{"):
        try:
            event = _json.decode(line)
        except msgspec.DecodeError:
            return None
        return LogLine(event.level, event.stage, event.message)
    return None


def last_words(log: str) -> str:
    """What it did last, for a person; empty where it has said nothing yet."""
    for line in reversed(log.splitlines()):
        if line.strip():
            event = parsed(line)
            return line if event is None else event.text
    return ""


def complaints(log: str) -> str:
    """What the supervisor has said that is wrong; empty where it has nothing to complain of."""
    said = []
    for line in log.splitlines():
        event = parsed(line)
        if event is not None and event.level == ERROR and event.stage.startswith("supervisor"):
            said.append(event.text)
        elif line.startswith(_COMMAND):
            said.append(line.removeprefix(_COMMAND))
    return "; ".join(said)


def http_address(log: str) -> str | None:
    """Where it serves HTTP, once it does; for a log of level info."""
    match = _READY.search(log)
    return match[1] if match else None
