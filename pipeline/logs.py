"""Log lines: one per life-cycle event, `key=value`, with stage and request id; nothing per token."""

import logging
import sys
import time
from typing import Any


class KeyValueFormatter(logging.Formatter):
    """`10:31:07.120 I schedule.0 admitted request=1f3a prompt=128`, fields given as `extra={"fields": {...}}`."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields: dict[str, Any] = getattr(record, "fields", {})
        thread = record.threadName or ""
        stage = thread.removeprefix("stage ") if thread.startswith("stage ") else self._stage  # see inline.py
        line = f"{clock}.{record.msecs:03.0f} {record.levelname[0]} {stage} {record.getMessage()}"
        for key, value in fields.items():
            text = str(value)
            line += f" {key}={text!r}" if " " in text else f" {key}={text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def open_log(stage: str, level: str) -> logging.Logger:
    """The process's logger, on standard error. To be called once a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(stage))
    log = logging.getLogger("pipeline")
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False
    return log
