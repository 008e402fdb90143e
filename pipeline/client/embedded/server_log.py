"""Parse a server's log for its owner: lines in either format of logs.py. Other lines come from libraries and
tracebacks."""

import re
from typing import NamedTuple

import msgspec

ERROR = "error"
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": ERROR, "C": "critical"}
_TEXT = re.compile(r"^\d\d:\d\d:\d\d\.\d+ ([A-Z]) (\S+) (.*)$")
_READY = re.compile(r'ready on (https?://[^\s"]+)')
_COMMAND = "pipeline: error: "
"""The prefix of the command line's error messages."""


class LogLine(NamedTuple):
    """One log line."""

    level: str
    stage: str
    """Such as `schedule.0`."""
    text: str


class _JsonLine(msgspec.Struct):
    level: str
    stage: str
    message: str


_json: msgspec.json.Decoder[_JsonLine] = msgspec.json.Decoder(_JsonLine)


def parsed(line: str) -> LogLine | None:
    """Parse a log line; None if it is not one."""
    if match := _TEXT.match(line):
        return LogLine(_LEVELS.get(match[1], match[1]), match[2], match[3])
    if line.startswith("{"):
        try:
            event = _json.decode(line)
        except msgspec.DecodeError:
            return None
        return LogLine(event.level, event.stage, event.message)
    return None


def last_message(log: str) -> str:
    """The message of the last line; empty for an empty log."""
    for line in reversed(log.splitlines()):
        if line.strip():
            event = parsed(line)
            return line if event is None else event.text
    return ""


def errors(log: str) -> str:
    """The supervisor's error messages, joined; empty if there are none."""
    found = []
    for line in log.splitlines():
        event = parsed(line)
        if event is not None and event.level == ERROR and event.stage.startswith("supervisor"):
            found.append(event.text)
        elif line.startswith(_COMMAND):
            found.append(line.removeprefix(_COMMAND))
    return "; ".join(found)


def http_address(log: str) -> str | None:
    """The server's HTTP address; None if it is not ready yet. Needs log level info."""
    match = _READY.search(log)
    return match[1] if match else None
