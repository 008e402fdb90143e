"""Log lines: one per lifecycle event, with stage and `key=value` fields; nothing per token.

Fields are passed as `extra={"fields": {...}}`. To follow a request, use its id: `grep request=1f3a`, or in JSON
`"request":"1f3a"`. The gateway's first line about it has the id that the client knows.
"""

import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]


class KeyValueFormatter(logging.Formatter):
    """`10:31:07.120 I schedule.0 admitted request=1f3a prompt=128`"""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        stage = _stage_of(record, self._stage)
        line = f"{clock}.{record.msecs:03.0f} {record.levelname[0]} {stage} {record.getMessage()}"
        for key, value in fields.items():
            text = str(value)
            line += f" {key}={text!r}" if " " in text else f" {key}={text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
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
            "message": record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            line[f"{key}_" if key in self.OWN else key] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return self._encoder.encode(line).decode()
        except (TypeError, ValueError, RecursionError):  # not JSON: lone surrogates, keys of other types, cycles
            return self._encoder.encode({_text(key): _text(value) for key, value in line.items()}).decode()


def _stage_of(record: logging.LogRecord, stage: str) -> str:
    """The stage that logged a line. With `--inline`, stages are threads, and the thread's name determines it."""
    thread = record.threadName or ""
    return thread.removeprefix("stage ") if thread.startswith("stage ") else stage


def _text(value: object) -> str:
    return str(value).encode("utf-8", "replace").decode()


def open_log(stage: str, level: str, log_format: LogFormat = "text") -> logging.Logger:
    """Set up the process's logger on standard error. Call it once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(stage) if log_format == "json" else KeyValueFormatter(stage))
    log = logging.getLogger("pipeline")
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False
    if log_format == "json":  # libraries' lines too, so that every line is an object
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    return log
