"""Output files of commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.load import ConfigError


def require_writable(path: Path, option: str) -> None:
    """Raise ConfigError if a file can't be written, before the command starts its work."""
    with writing(path, option):
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # opening a pipe or a device would have an effect on its reader
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError if writing inside this context fails."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{option} {path}: can't be written: {reason}"]) from error
