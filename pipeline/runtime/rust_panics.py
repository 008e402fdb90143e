"""Panics of libraries in Rust, as errors that `except Exception` catches.

A panic inside an extension that is made with pyo3 (tokenizers, llguidance, safetensors) reaches Python as
`PanicException`. That is a BaseException, so code that handles every `Exception` of the library still ends with it.
Here it becomes an ordinary error, and no other BaseException does: KeyboardInterrupt, SystemExit, GeneratorExit and
asyncio.CancelledError pass unchanged.

The library itself writes two lines on stderr for each panic, and a backtrace with RUST_BACKTRACE=1.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RustPanic(Exception):
    """A library in Rust panicked; the message is its own."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises RustPanic where the code inside panics."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RustPanic(str(error)) from error


def is_panic(error: BaseException) -> bool:
    """By name: every extension has a class of its own, and none of them can be imported."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")
