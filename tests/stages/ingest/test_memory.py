"""The memory that long prompts take while they are encoded is given back."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.runtime import messages as m
from pipeline.runtime.process import heap
from pipeline.stages.ingest.prompts import prompt_preparer
from tests.rig import Rig
from tests.stages.ingest import models as tiny

MIB = 1024**2
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("is_refused", [False, True])
def test_memory_is_given_back_after_a_long_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    trimmed: list[str] = []
    monkeypatch.setattr(heap, "trim", lambda: trimmed.append(threading.current_thread().name))
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts(max_model_len=512 if is_refused else 1_000_000))
        rig.send(tiny.submit("x" * (prompt_preparer.TRIM_CHARS // 10), request_id=1), "gateway.0")
        rig.receive("gateway", m.Rejected if is_refused else m.Accepted)
        assert not trimmed
        rig.send(tiny.submit("x" * prompt_preparer.TRIM_CHARS, request_id=2), "gateway.0")
        rig.receive("gateway", m.Rejected if is_refused else m.Accepted)
        (thread,) = trimmed
        assert thread.startswith("encode-long"), "not in the loop"


def test_trimming_gives_freed_memory_back() -> None:
    """Without it, a thread's heap keeps what the tokenizer has freed. Measured in a process of its own: what other
    tests have left in a heap decides how much a trim gives back."""
    command = [sys.executable, "-c", f"from {__name__} import print_sizes; print_sizes()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    kept, trimmed = map(int, done.stdout.split())
    assert kept > 16 * MIB and trimmed < max(kept // 2, 8 * MIB), (kept, trimmed)


def print_sizes() -> None:
    """The memory that encoding a long text has added, before a trim and after it. The thread goes on meanwhile, as in
    ingest: what its end frees may join the end of its heap, which glibc then gives back by itself."""
    tokenizer = tiny.byte_tokenizer()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_encode, tokenizer, "abc").result()  # the thread, and what it keeps
        before = _anonymous_bytes()
        pool.submit(_encode, tokenizer, "ab " * 100_000).result()
        kept = _anonymous_bytes() - before
        heap.trim()
        print(kept, _anonymous_bytes() - before)


def _anonymous_bytes() -> int:
    """This process's memory without the pages of files, such as the tokenizer's code."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def _encode(tokenizer: Tokenizer, text: str) -> None:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    assert np.array(encoding.ids[:3]).size == 3
