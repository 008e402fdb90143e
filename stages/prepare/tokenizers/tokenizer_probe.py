"""Tries a tokenizer.json in a separate process with limited memory and time.

The file is untrusted: it contains regular expressions, and replacements that can expand one letter to terabytes. The
library runs them also on the texts of tokens that are added to it. It aborts the process when memory runs out, and
panics on some files.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken

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
import json
from tokenizers import AddedToken, Tokenizer

FLAGS = sys.argv[4].split()

def added():
    known = tokenizer.get_added_tokens_decoder()
    return [{"id": i, **{flag: getattr(known[i], flag) for flag in FLAGS}} for i in sorted(known)]

tokenizer = Tokenizer.from_file(sys.argv[1])
before = added()
given = json.load(sys.stdin)
specials = {*given["specials"]}
for call in given["calls"]:
    tokens = [AddedToken(**token) for token in call["tokens"]]
    specials.update(token.content for token in tokens if token.special or call["as_special"])
    (tokenizer.add_special_tokens if call["as_special"] else tokenizer.add_tokens)(tokens)
after = added()
for token in after:
    # The library forgets no special token: one that is added again, not as special, is one until it is saved.
    token["special"] = token["content"] in specials
ids = tokenizer.encode("a", add_special_tokens=True).ids[:1]
print(json.dumps({"first": ids[0] if ids else None, "added": None if after == before else after}))
"""
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""The fields of an added token, beside its id."""


class AddCall(NamedTuple):
    """Tokens that are added in one call."""

    tokens: Sequence[AddedToken]
    as_special: bool = False


class Probed(msgspec.Struct, frozen=True):
    """What the library says of a tokenizer."""

    first: int | None
    """The first id of an encoded text with special tokens; None if the encoding is empty."""
    added: list[dict[str, Any]] | None
    """All its added tokens, as in tokenizer.json; None if adding tokens changed none of them."""


def probe(path: Path, what: Path, calls: Sequence[AddCall] = (), specials: Iterable[str] = ()) -> Probed:
    """Load a tokenizer, add tokens to it, and encode a letter. `specials` are the special tokens that its file has.

    Raises ModelError, naming the file as `what`, if the library can't read the tokenizer, add the tokens or encode.
    """
    given = msgspec.json.encode(
        {
            "specials": sorted(specials),
            "calls": [
                {
                    "tokens": [{flag: getattr(token, flag) for flag in FLAGS} for token in call.tokens],
                    "as_special": call.as_special,
                }
                for call in calls
            ],
        }
    )
    try:
        done = run(path, given)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{what} cannot be read: encoding one letter took more than {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        words = lines[-1] if lines else f"exit code {done.returncode}"
        words = words.removeprefix("Exception: ").removeprefix("pyo3_runtime.PanicException: ")[:MAX_WORDS]
        raise ModelError(f"{what} cannot be read: {words}")
    return msgspec.json.decode(done.stdout, type=Probed)


def run(path: Path, given: bytes) -> "subprocess.CompletedProcess[bytes]":
    """Run PROGRAM with a tokenizer and its input. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, "-P", "-c", PROGRAM, str(path), str(MAX_BYTES), str(int(TIMEOUT_S)), " ".join(FLAGS)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return subprocess.run(command, input=given, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
