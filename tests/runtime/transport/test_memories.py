"""Segments of processes that were restarted."""

from pipeline.runtime.transport.memories import Memories
from pipeline.shm.arena import Arena
from pipeline.shm.arrays import INLINE_BYTES, ShmRef


def segment_of(memories: Memories, incarnation: int) -> ShmRef:
    """Map the segment of this incarnation of `execute.0`. Returns the array that it holds: its incarnation."""
    memory = memoryview(bytearray(1 << 16))
    reference = Arena("execute.0", memory, incarnation).put(
        bytes([incarnation]) * (INLINE_BYTES + 1), readers=("schedule.0",)
    )
    assert isinstance(reference, ShmRef)
    memories.add("execute.0", memory, incarnation)
    return reference


def test_arrays_of_all_processes_that_died_in_a_wake_are_read() -> None:
    memories = Memories()
    arrays = [segment_of(memories, incarnation) for incarnation in (1, 2, 3)]
    assert [memories.data_of(array)[0] for array in arrays] == [1, 2, 3]
    memories.trim()
    assert [memories.data_of(array)[0] for array in arrays[1:]] == [2, 3]
