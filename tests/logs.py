"""Log lines that a stage writes in a thread of the test's process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Lines(logging.Handler):
    """Keeps the fields of lines with one message."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self._message:
            self.found.append(vars(record)["fields"])


@contextmanager
def lines_of(message: str) -> Iterator[list[dict[str, Any]]]:
    """The fields of each line with this message that is written meanwhile; the list grows."""
    handler, log = _Lines(message), logging.getLogger("pipeline")
    log.addHandler(handler)
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
