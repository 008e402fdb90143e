"""Why the supervisor's loop ends, and the exit codes of `pipeline serve`."""

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_STAGE_DIED = 3
EXIT_NO_ROOM = 5
"""Of one of several models, which does not fit into memory_bytes. No process ends with it."""


class Stopping(Exception):
    """A signal came, a stage ended, or a deadline passed. `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StageKilled(Exception):
    """A signal has ended a stage's process before the server was ready."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
