"""Errors and warnings of commands."""

import sys

from pipeline.runtime.log.printable import printable

MAX_CHARS = 64 * 1024


def complain(command: str, problem: object, kind: str = "error") -> None:
    """Print `pipeline ps: error: …` to standard error. The problem may repeat what a server or a model's file says, so
    its control characters are shown as escapes."""
    print(f"{command}: {kind}: {printable(str(problem), keep=chr(10), most=MAX_CHARS)}", file=sys.stderr, flush=True)
