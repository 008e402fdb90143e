"""Why a model failed, for its clients."""

import logging
import threading

from pipeline.supervisor.models.last_errors import MAX_CHARS, LastErrors


def test_an_error_that_repeats_a_file_is_shortened() -> None:
    log = logging.getLogger("test_last_errors")
    errors = LastErrors(log)
    errors.watch("chat", threading.current_thread().name)
    log.error("config.json: %s: is no name", "A" * 1_000_000)
    found = errors.of("chat")
    errors.close()
    assert len(found) == MAX_CHARS
    assert found.startswith("config.json: AAA") and " ... AAA" in found and found.endswith("AAA: is no name")
