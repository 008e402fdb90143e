"""The parts of the process that computes masks, driven by hand."""

import platform
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.grammars.engine import Engine
from pipeline.runtime.workers.worker import receive
from pipeline.stages.execute.grammar_masks.memory import Begin, Fill, MaskMemory, MaskReport, Order, State
from pipeline.stages.execute.grammar_masks.worker import MaskWorker, main
from tests.stages.execute.structured import lark
from tests.stages.ingest import models as tiny


class PanickingEngine(Engine):
    """Panics for one grammar."""

    panics_at = ""

    def matcher(self, grammar: str) -> Any:
        if grammar == self.panics_at:
            tiny.panic()
        return super().matcher(grammar)


@pytest.fixture
def thread_stacks() -> Iterator[None]:
    """Restores the stack size of threads, which the worker sets for its process."""
    before = threading.stack_size()
    yield
    threading.stack_size(before)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_panic_fails_only_its_row(tmp_path: Path, num_threads: int, thread_stacks: None) -> None:
    engine = PanickingEngine(tiny.folder(tmp_path))
    engine.panics_at = lark("b")
    memory = MaskMemory(2, engine.vocab_size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = MaskWorker(theirs, engine, memory, num_threads)
        fills = [Fill(row, row, b"", Begin(lark(text), [], False)) for row, text in enumerate("ab")]
        for ticket in (1, 2):
            worker._do(Order([], [], ticket, fills))
            assert msgspec.msgpack.decode(receive(ours), type=MaskReport) == MaskReport(
                ticket,
                [1],
                ["The grammar failed: it can't be used: Onig: Regex search error: retry-limit-in-match over"],
            )
            assert memory.word[0] == ticket
            assert memory.states.tolist() == [State.DONE, State.FAILED]
            allowed = np.flatnonzero(np.unpackbits(memory.words[0].view(np.uint8), bitorder="little")).tolist()
            assert allowed == [tiny.byte_tokenizer().token_to_id("a")]
    memory.close()


def test_a_machine_of_unknown_memory_order_gets_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor polls a word. If it could overtake the masks, outputs would be wrong without an error."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        main(theirs, "no such folder", "-1", "1", "100")
        report = msgspec.msgpack.decode(receive(ours), type=MaskReport)
    assert report == MaskReport(
        0, errors=["masks need the memory order of x86_64 and aarch64, and this machine is riscv64"]
    )
