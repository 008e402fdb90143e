"""Keeps folders and files small enough to read: no folder has more than 15 files, and no file of code more than 400
lines. EXCEPTIONS may be larger, for the reason beside them.

Documents and tests/data are not counted: a page is as long as its subject, and data is no code.
"""

import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("config", "kernels", "pipeline", "shm", "stages", "tests", "tools")
CODE = (".py", ".cpp", ".h", ".js", ".mjs", ".css", ".html")
LEFT_OUT = ("__pycache__", "node_modules", "tests/data")
MAX_FILES = 15
MAX_LINES = 400

EXCEPTIONS: Mapping[str, str] = {
    "kernels/cpu/*.h": "One library is compiled of all headers in the folder, and its key in the cache is made of "
    "them. A header has all variants of an op, which share its vectors and loops.",
}
"""Patterns of paths, and why neither these files' lines are counted, nor the files in their folder."""


def too_large(root: Path = ROOT) -> Iterator[str]:
    """Each folder that has too many files, and each file that has too many lines."""
    for top in FOLDERS:
        for folder in _folders(root / top):
            files = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
            counted = [path for path in files if not _is_exception(path.relative_to(root).as_posix())]
            if len(counted) > MAX_FILES:
                yield f"{folder.relative_to(root)}: {len(counted)} files, more than {MAX_FILES}: divide it by subject"
            for path in counted:
                num_lines = path.read_bytes().count(b"\n") if path.suffix in CODE else 0
                if num_lines > MAX_LINES:
                    yield f"{path.relative_to(root)}: {num_lines} lines, more than {MAX_LINES}: split it by subject"


def _folders(folder: Path) -> Iterator[Path]:
    """A folder and all below it. Links are not followed."""
    if folder.is_dir() and not folder.is_symlink() and not any(map(folder.match, LEFT_OUT)):
        yield folder
        for below in sorted(folder.iterdir()):
            yield from _folders(below)


def _is_exception(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in EXCEPTIONS)


if __name__ == "__main__":
    faults = list(too_large())
    print("\n".join(faults) if faults else "no folder and no file is too large")
    sys.exit(1 if faults else 0)
