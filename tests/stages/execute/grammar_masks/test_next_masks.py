"""Masks of many rows at once are those of each row alone."""

import random
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.grammars.engine import Engine
from pipeline.runtime.workers.worker import receive
from pipeline.stages.execute.grammar_masks import next_masks
from pipeline.stages.execute.grammar_masks.memory import Begin, Fill, MaskMemory, MaskReport, Order, State
from pipeline.stages.execute.grammar_masks.worker import MaskWorker
from tests.stages.execute.grammar_masks.test_mask_worker import thread_stacks as thread_stacks
from tests.stages.execute.structured import lark
from tests.stages.ingest import models as tiny

GRAMMARS = ("(a|b)+c", "a{2,9}", "(a|b|c)*", "(a|b|c){30}", "b")
NUM_ROWS = 24


class RowByRowMasks:
    """The worker, made to compute row by row."""

    def __init__(self, engine: Engine, memory: MaskMemory, end: socket.socket) -> None:
        self.worker, self.memory = MaskWorker(end, engine, memory, 1), memory

    def fill(self, fills: list[Fill]) -> None:
        for fill in fills:
            self.worker._fill(fill)


def allowed(words: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def test_rows_are_timed_one_by_one_after_a_slow_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_stacks: None
) -> None:
    """The library's threads don't tell the time of each row."""
    monkeypatch.setattr(next_masks, "POOL_S", -1.0)
    monkeypatch.setattr(next_masks, "SLOW_STEP_S", -1.0)
    monkeypatch.setattr(next_masks, "NUM_TIMED", 2)
    engine = Engine(tiny.folder(tmp_path))
    memory = MaskMemory(3, engine.vocab_size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = MaskWorker(theirs, engine, memory, 2)
        worker._do(Order([], [], 1, [Fill(row, row, b"", Begin(lark("a{9}"), [], False)) for row in range(3)]))
        a, are_timed = np.array(allowed(memory.words[0]), np.int32).tobytes(), []
        assert len(a) == 4
        for ticket in range(2, 8):
            worker._do(Order([], [], ticket, [Fill(row, row, a, None) for row in range(3)]))
            are_timed.append(bool((memory.times > 0).all()))
    memory.close()
    assert are_timed == [False, True, True, False, True, True]


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
def test_masks_of_all_rows_equal_masks_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pool: bool, is_wide: bool, thread_stacks: None
) -> None:
    """Rows with and without EOS and stop ids, until they end; some consume ids that their grammar does not allow."""
    monkeypatch.setattr(next_masks, "POOL_S", -1.0)
    tokenizer = tiny.byte_tokenizer()
    if is_wide:  # a model with fewer ids than its tokenizer
        tokenizer.add_tokens(["bb", "cab", "aaa"])
    engine = Engine(tiny.folder(tmp_path, tokenizer=tokenizer))
    assert (engine.tokenizer.vocab_size != engine.vocab_size) == is_wide
    chance = random.Random(5)
    memories = [MaskMemory(NUM_ROWS, engine.vocab_size) for _ in range(2)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        together = MaskWorker(theirs, engine, memories[0], 2 if has_pool else 1)
        assert (together._next_masks._pool is not None) == has_pool
        alone = RowByRowMasks(engine, memories[1], theirs)
        stop_ids: list[list[int]] = [[], [65], [1, 5]]
        fills = []
        for row in range(NUM_ROWS):
            begin = Begin(lark(chance.choice(GRAMMARS)), chance.choice(stop_ids), chance.random() < 0.5)
            fills.append(Fill(row, NUM_ROWS - 1 - row, b"", begin))
        together._do(Order([], [], 1, fills))
        alone.fill(fills)
        num_compared = num_failed = 0
        live = list(range(NUM_ROWS))
        for ticket in range(2, 14):
            fills = []
            for row in live:
                choice = allowed(memories[1].words[NUM_ROWS - 1 - row])
                token = chance.choice(choice) if chance.random() < 0.97 else chance.randrange(engine.vocab_size)
                fills.append(Fill(row, NUM_ROWS - 1 - row, np.array([token], np.int32).tobytes(), None))
            assert all(fill.is_next for fill in fills)
            together._do(Order([], [], ticket, fills))
            alone.fill(fills)
            for fill in fills:
                states = [memory.states[fill.slot] for memory in memories]
                assert states[0] == states[1]
                if states[0] == State.DONE:
                    num_compared += 1
                    assert (memories[0].words[fill.slot] == memories[1].words[fill.slot]).all()
                else:
                    num_failed += 1
                    live.remove(fill.row)
        assert set(together._rows) == set(alone.worker._rows) == set(live)
    assert num_compared > 60 and num_failed > 3
    for memory in memories:
        memory.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_all_rows_may_fail_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int, thread_stacks: None
) -> None:
    monkeypatch.setattr(next_masks, "POOL_S", -1.0)
    engine = Engine(tiny.folder(tmp_path))
    memory = MaskMemory(3, engine.vocab_size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = MaskWorker(theirs, engine, memory, num_threads)
        worker._do(Order([], [], 1, [Fill(row, row, b"", Begin(lark("a+"), [], False)) for row in range(3)]))
        wrong = np.array([tiny.byte_tokenizer().token_to_id("b")], np.int32).tobytes()
        worker._do(Order([], [], 2, [Fill(row, row, wrong, None) for row in range(3)]))
        assert memory.word[0] == 2 and memory.states.tolist() == [State.FAILED] * 3 and not worker._rows
        report = msgspec.msgpack.decode(receive(ours), type=MaskReport)
        assert report.slots == [0, 1, 2]
        for error in report.errors:
            assert error.startswith("The grammar failed: the output does not match the grammar: ")
    memory.close()
