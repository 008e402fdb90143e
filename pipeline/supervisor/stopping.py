"""Why the supervisor's loop ends, and the exit codes of `pipeline serve`."""

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_STAGE_DIED = 3


class Stopping(Exception):
    """A signal came, a stage ended, or a deadline passed. `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StageKilled(Exception):
    """A signal has ended a stage's process before the server was ready."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
