"""Log lines: one per lifecycle event, with stage and `key=value` fields; nothing per token.

Fields are passed as `extra={"fields": {...}}`. To follow a request, use its id: `grep request=1f3a`, or in JSON
`"request":"1f3a"`. The gateway's first line about it has the id that the client knows.

Clients choose some of what is logged. So no value ends a line or reaches a terminal as a control character (see
`printable`), and each is bounded. Of a text with several lines, such as a traceback, all but the first are indented: no
text can look like another event.
"""

import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from pipeline.runtime.log.log_handler import LogHandler
from pipeline.runtime.log.printable import bounded, json_printable, printable

LogFormat = Literal["text", "json"]

INDENT = "    "
"""Of the second and further lines of a text."""
MAX_TEXT_CHARS = 512 * 1024
"""Of a message or a traceback: the stacks of a stage's threads are up to 256 KiB."""


class KeyValueFormatter(logging.Formatter):
    """`10:31:07.120 I schedule.0 admitted request=1f3a prompt=128`"""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        stage = _stage_of(record, self._stage)
        line = f"{clock}.{record.msecs:03.0f} {record.levelname[0]} {stage} {_lines(record.getMessage())}"
        for key, value in fields.items():
            text = bounded(str(value))
            is_plain = " " not in text and text.isprintable()
            line += f" {printable(key)}={text if is_plain else repr(text)}"
        if record.exc_info:
            line += "\n" + INDENT + _lines(self.formatException(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """`{"ts":"2026-01-31T10:31:07.120Z","level":"info","stage":"schedule.0","pid":77,"message":"admitted","request":"1f3a"}`

    Fields are added to these keys; a field with the name of one of these gets an underscore. A traceback is in
    `exception`.
    """

    OWN = ("ts", "level", "stage", "pid", "message", "exception")

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "ts": f"{when:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "stage": _stage_of(record, self._stage),
            "pid": os.getpid(),
            "message": bounded(record.getMessage(), MAX_TEXT_CHARS),
        }
        for key, value in getattr(record, "fields", {}).items():
            line[f"{key}_" if key in self.OWN else key] = bounded(value) if isinstance(value, str) else value
        if record.exc_info:
            line["exception"] = bounded(self.formatException(record.exc_info), MAX_TEXT_CHARS)
        try:
            text = self._encoder.encode(line).decode()
        except (TypeError, ValueError, RecursionError):  # not JSON: lone surrogates, keys of other types, cycles
            text = self._encoder.encode({_text(key): _text(value) for key, value in line.items()}).decode()
        return json_printable(text)


def _stage_of(record: logging.LogRecord, stage: str) -> str:
    """The stage that logged a line. With `--inline`, stages are threads, and the thread's name determines it."""
    thread = record.threadName or ""
    return thread.removeprefix("stage ") if thread.startswith("stage ") else stage


def _lines(text: str) -> str:
    """A text of one line, or of several."""
    return f"\n{INDENT}".join(printable(line) for line in bounded(text, MAX_TEXT_CHARS).split("\n"))


def _text(value: object) -> str:
    return str(value).encode("utf-8", "replace").decode()


def of_model(stage: str, model: str) -> str:
    """A stage's name in the log of a server of several models: `execute.0@chat`."""
    return f"{stage}@{model}" if model else stage


def open_log(stage: str, level: str, log_format: LogFormat = "text") -> logging.Logger:
    """Set up the process's logger on standard error. Call it once per process."""
    handler = LogHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(stage) if log_format == "json" else KeyValueFormatter(stage))
    log = logging.getLogger("pipeline")
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False
    if log_format == "json":  # libraries' lines too, so that every line is an object
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    return log
