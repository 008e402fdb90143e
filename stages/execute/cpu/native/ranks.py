"""The memory in which the ranks of a program gather their results. A program without ranks has it for itself."""

import ctypes

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.cpu.ranks.group import RankGroup


class RankMemory:
    """Allocates in the memory that ranks share, and records what ranks do together. Without `ranks`, the memory is the
    program's own, and there are no barriers."""

    def __init__(self, library: ctypes.CDLL, memory: NativeMemory, ranks: RankGroup | None) -> None:
        self._library, self._memory, self._ranks = library, memory, ranks
        self._vocab: native.NativeVocabShare | None = None

    def _allocate(self, num_bytes: int) -> int:
        if self._ranks is None:
            return self._memory.allocate(num_bytes)
        return int(self._ranks.allocate(num_bytes).ctypes.data)

    def floats(self, rows: int, width: int) -> int:
        return self._allocate(rows * width * 4)

    def rows(self, rows: int, width: int) -> native.NativeRows:
        """Rows of activations of any form."""
        library = self._library
        stride = max(library.activation_bytes(form, width) for form in ActivationForm)
        return native.NativeRows(self._allocate(library.activation_rows(rows) * stride), stride)

    def use(self, program: int, num_threads: int = 0, max_num_samples: int = 0) -> None:
        """Let a program compute the rank's part of the vocabulary. The first call says how many threads each rank has,
        and how many ids a step samples at most."""
        ranks = self._ranks
        if ranks is None:
            return
        if self._vocab is None:
            num_bytes = self._library.best_bytes(num_threads * ranks.context.num_ranks, max_num_samples)
            vocab = ranks.share.vocab
            self._vocab = native.NativeVocabShare(
                ranks.handle, self._allocate(num_bytes), num_threads, vocab.start, len(vocab)
            )
        self._library.program_use_ranks(program, ctypes.byref(self._vocab))

    def barrier(self, program: int, what: str, layer: int) -> None:
        """Record a barrier behind `what`; -1: it is in no layer."""
        if self._ranks is not None:
            self._library.program_barrier(program, self._ranks.handle, what.encode(), layer)
