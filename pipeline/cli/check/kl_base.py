"""Writes the reference's log probabilities as llama.cpp's llama-perplexity does with --kl-divergence-base, so that it
can compare itself with the same reference.

The file (tools/perplexity/perplexity.cpp): "_logits_", then as int32 the tokens of a chunk, V = vocab_size and the
number of chunks, then all ids as int32. For each counted position follow float32 `scale` and `min_log_prob`, and V
uint16 `q`, padded to an even number: log P = scale * q + min_log_prob. Tokens that are more than 16 nats behind the
most likely one have q = 0.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from pipeline.cli.check.cases import Logits
from pipeline.cli.check.chunks import CHUNK_SIZE
from pipeline.cli.out_file import output
from pipeline.errors import UserError

MAGIC = b"_logits_"
DEPTH = 16.0
"""Nats below the most likely token that are stored."""
LEVELS = 65535


class KlBaseFile:
    """Writes one file, chunk by chunk. As a context manager, it gives the file its name unless the
    measurement fails."""

    def __init__(self, path: str) -> None:
        """Raises UserError if the file can't be created."""
        self._path = Path(path)
        self._output = output(self._path)
        self._is_begun = False
        try:
            self._file = self._output.__enter__()
        except OSError as error:
            raise UserError(f"--kl-base {path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> "KlBaseFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._output.__exit__(kind, error, traceback)

    def add(self, chunks: Sequence[Sequence[int]], logits: Logits) -> None:
        """Append the counted positions of the next of `chunks`: finite logits [positions, V]. The first call also
        writes the ids of all chunks. Raises UserError if the file can't be written."""
        try:
            if not self._is_begun:
                self._is_begun = True
                self._file.write(MAGIC + struct.pack("<iii", CHUNK_SIZE, logits.shape[1], len(chunks)))
                self._file.write(np.array(chunks, dtype="<i4").tobytes())
            for row in logits:
                self._file.write(record_of(row))
            self._file.flush()
        except OSError as error:
            raise UserError(f"--kl-base {self._path}: cannot be written: {error.strerror}") from error


def record_of(logits: Logits) -> bytes:
    """A position's record: of finite logits [V]."""
    size = len(logits)
    largest = float(logits.max())
    smallest = max(float(logits.min()), largest - DEPTH)
    log_sum = float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    scale = np.float32((largest - smallest) / LEVELS)
    codes = np.zeros(size + size % 2, dtype="<u2")
    if scale > 0:
        codes[:size] = np.rint((np.maximum(logits, np.float32(smallest)) - np.float32(smallest)) / scale).clip(
            0, LEVELS
        )
    return struct.pack("<ff", scale, smallest - largest - log_sum) + codes.tobytes()
