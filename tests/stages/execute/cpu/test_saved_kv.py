"""What an executor leaves to the next one while the server sleeps: everything, or nothing and the reason."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.files.private_files import nameless_file
from pipeline.runtime.messages import Pooling
from pipeline.shm import segment
from pipeline.stages.execute.cpu import saved_kv
from pipeline.stages.execute.cpu.saved_kv import SavedKV
from pipeline.stages.execute.pooling.pool import Pool
from tests.fakes import inline

FACTS = m.ExecuteFacts(8, 16, 128, 100, num_state_slots=4, block_bytes=300, slot_bytes=40)


class Memory:
    """The KV memory of a program: blocks and slots, in arrays."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.blocks, self.slots = (random.integers(0, 256, shape, np.uint8) for shape in ((8, 300), (4, 40)))

    def copy_blocks(self, sources: Any, targets: Any, other: Any = None) -> None:
        self._copy(self.blocks, other, sources, targets)

    def copy_states(self, swapped: Any, sources: Any, targets: Any) -> None:
        self._copy(self.slots, swapped, sources, targets)

    def _copy(self, own: Any, other: Any, sources: Any, targets: Any) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            value = own[source] if source < len(own) else other[source - len(own)]
            (own if target < len(own) else other)[target if target < len(own) else target - len(own)] = value


def saved(fd: int, memory: Memory, pool: Pool, facts: m.ExecuteFacts = FACTS) -> SavedKV:
    program: Any = memory
    return SavedKV(fd, program, facts, pool)


def new_pool() -> Pool:
    config: Any = SimpleNamespace(rms_norm_eps=1e-5, norm="rms")
    return Pool(config, None)


def take(array: m.Array, dtype: Any) -> Any:
    return np.frombuffer(inline(array), dtype)


def message(blocks: list[int], slots: list[int]) -> m.SaveKV:
    return m.SaveKV(7, np.array(blocks, np.int32).tobytes(), np.array(slots, np.int32).tobytes())


@pytest.fixture(params=["memory", "file"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    found = segment.create_sparse("saved", 0) if request.param == "memory" else nameless_file(tmp_path)
    yield found
    os.close(found)


def test_the_next_executor_has_the_same_blocks_slots_and_partial_results(fd: int) -> None:
    before, after = Memory(1), Memory(2)
    pools = [new_pool() for _ in range(2)]
    pools[0].add(3, Pooling.MEAN, 0, np.arange(12, dtype=np.float32).reshape(2, 6))
    answer = saved(fd, before, pools[0]).save(message([1, 5, 2], [3]), take)
    assert (answer.number, answer.problem) == (7, "")
    assert answer.num_bytes == os.fstat(fd).st_size > 3 * 300 + 40
    untouched = after.blocks[[0, 3, 4, 6, 7]].copy()
    loader = saved(fd, after, pools[1])
    assert loader.load() == answer.num_bytes
    assert (after.blocks[[1, 5, 2]] == before.blocks[[1, 5, 2]]).all()
    assert (after.slots[3] == before.slots[3]).all()
    assert (after.blocks[[0, 3, 4, 6, 7]] == untouched).all()
    assert pools[1].partial() == pools[0].partial() != {}
    loader.clear()
    assert loader.load() == 0


def test_an_empty_server_saves_nothing_but_the_header(fd: int) -> None:
    saver = saved(fd, Memory(), new_pool())
    assert saver.save(message([], []), take).problem == ""
    assert saver.load() > 0


def test_without_room_nothing_is_saved_and_the_answer_says_why(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_kv, "available_bytes", lambda: 4000)
    is_memory = "memfd:" in str(Path(f"/proc/self/fd/{fd}").readlink())
    found = SimpleNamespace(f_blocks=0 if is_memory else 9, f_bavail=4, f_frsize=1000)
    monkeypatch.setattr(os, "fstatvfs", lambda _: found)
    answer = saved(fd, Memory(), new_pool()).save(message([1], []), take)
    assert "but only 4000B of" in answer.problem and "execute.swap_dir" in answer.problem
    assert (answer.num_bytes, os.fstat(fd).st_size) == (0, 0)


def test_an_executor_without_memory_for_it_says_so() -> None:
    answer = saved(-1, Memory(), new_pool()).save(message([1], []), take)
    assert answer.problem == "this executor has no memory to save its KV cache in"
    assert saved(-1, Memory(), new_pool()).load() == 0


def test_blocks_of_another_size_are_refused(fd: int) -> None:
    saved(fd, Memory(), new_pool()).save(message([1], []), take)
    other = m.ExecuteFacts(8, 16, 128, 100, num_state_slots=4, block_bytes=600, slot_bytes=40)
    with pytest.raises(UserError, match="blocks and states of 300 and 40 bytes, those of this one have 600 and 40"):
        saved(fd, Memory(), new_pool(), other).load()
