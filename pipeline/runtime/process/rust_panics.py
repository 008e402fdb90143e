"""Convert panics of Rust libraries to errors that `except Exception` catches.

A panic in a pyo3 extension (tokenizers, llguidance, safetensors) reaches Python as `PanicException`. It is a
BaseException, so `except Exception` does not catch it. Here it becomes an ordinary error. All other BaseExceptions
(KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError) pass unchanged.

For each panic, the library writes two lines to stderr, and with RUST_BACKTRACE=1 a backtrace.
"""


class RustPanic(Exception):
    """A Rust library panicked. The message is the library's."""


class panics_as_errors:
    """Raise RustPanic if the code inside panics."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_panic(error):
            raise RustPanic(str(error)) from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic. Checked by name, because each extension has a class of its own that can't be
    imported."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")
