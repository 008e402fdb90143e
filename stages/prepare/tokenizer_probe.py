"""Tries a tokenizer.json in a separate process with limited memory and time.

The file is untrusted: it contains regular expressions, and replacements that can expand one letter to terabytes. The
library aborts the process when memory runs out, and panics on some files.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from pipeline.stages.prepare.sources.source import ModelError

MAX_BYTES = 4 * 1024**3
"""Limit of the process's address space. A vocabulary of 262,144 tokens takes an eighth of it."""
TIMEOUT_S = 60.0
MAX_WORDS = 300

PROGRAM = """
import resource, sys
from pathlib import Path

def limit(what, most):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))

limit(resource.RLIMIT_AS, int(sys.argv[2]))
limit(resource.RLIMIT_CPU, int(sys.argv[3]))
limit(resource.RLIMIT_CORE, 0)
from tokenizers import Tokenizer

print(Tokenizer.from_file(sys.argv[1]).encode("a", add_special_tokens=True).ids[:1])
"""


def first_id(path: Path, what: Path) -> int | None:
    """The first id of an encoded text with special tokens, None if the encoding is empty.

    Raises ModelError, naming the file as `what`, if the library can't read the tokenizer or encode with it.
    """
    command = [sys.executable, "-P", "-c", PROGRAM, str(path), str(MAX_BYTES), str(int(TIMEOUT_S))]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{what} cannot be read: encoding one letter took more than {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        words = lines[-1] if lines else f"exit code {done.returncode}"
        words = words.removeprefix("Exception: ").removeprefix("pyo3_runtime.PanicException: ")[:MAX_WORDS]
        raise ModelError(f"{what} cannot be read: {words}")
    ids = msgspec.json.decode(done.stdout, type=list[int])
    return ids[0] if ids else None
