"""The last error that each model's thread has logged: why it failed, for its clients."""

import logging

MAX_CHARS = 1024
"""Errors show texts of a model's files, and all models' share one packet to the gateway."""


def shortened(text: str) -> str:
    """The beginning and the end of a text, in `MAX_CHARS`."""
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[: half - 2]} ... {text[3 - half :]}"


class LastErrors(logging.Handler):
    """Listens to a log."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.ERROR)
        self._log = log
        self._models: dict[str, str] = {}
        """By the name of the thread."""
        self._last: dict[str, str] = {}
        log.addHandler(self)

    def watch(self, model: str, thread: str) -> None:
        """This thread is the model's."""
        self._models[thread] = model

    def emit(self, record: logging.LogRecord) -> None:
        if (model := self._models.get(record.threadName or "")) is not None:
            self._last[model] = shortened(record.getMessage())

    def of(self, model: str) -> str:
        """Empty if there is none."""
        return self._last.get(model, "")

    def forget(self, model: str) -> None:
        self._last.pop(model, None)

    def close(self) -> None:
        self._log.removeHandler(self)
        super().close()
