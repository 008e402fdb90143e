"""A file that a command writes its result to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.load import ConfigError


def require_writable(path: Path, option: str) -> None:
    """Raise ConfigError where a file could not be written, before anything is done for it."""
    with writing(path, option):
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # opening a pipe or a device would be seen at its other end
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError where the file can't be written in here."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{option} {path}: can't be written: {reason}"]) from error
