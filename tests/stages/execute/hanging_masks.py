"""The mask process, in which the library never returns from a row whose last id is `HANGS`."""

import socket
from collections.abc import Sequence
from typing import Any

from pipeline.stages.execute.grammar_masks import worker
from pipeline.stages.execute.grammar_masks.next_masks import NextMasks

HANGS = 89
"""The byte tokenizer's "z"."""


def main(of: socket.socket, *args: str) -> None:
    process: Any = worker
    fill, consume = NextMasks.fill, process.consume

    def fill_all(self: NextMasks, rows: Any, slots: Any, ids: Sequence[int]) -> dict[int, str]:
        _hang_at(ids)
        return fill(self, rows, slots, ids)

    def consume_all(matcher: Any, ids: list[int]) -> None:
        _hang_at(ids[-1:])
        consume(matcher, ids)

    NextMasks.fill = fill_all  # type: ignore[method-assign]
    process.consume = consume_all
    worker.main(of, *args)


def _hang_at(ids: Sequence[int]) -> None:
    while HANGS in ids:
        pass
