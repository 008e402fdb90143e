"""Arrays in messages and in shared memory, and a stage's sockets."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime.transport.arrays import Arrays
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.memories import Memories
from pipeline.shm import segment
from pipeline.shm.arrays import INLINE_BYTES, ShmRef

NUM_BYTES = 1 << 18
READERS = ("schedule.0",)


def mapped(name: str, fd: int, *, writable: bool) -> Memories:
    memories = Memories()
    memories.add(name, segment.attach(fd, NUM_BYTES, writable=writable))
    return memories


@pytest.fixture
def pair():
    """The writer's and the reader's side of one segment."""
    fd = segment.create("ingest", NUM_BYTES)
    writer = Arrays(mapped("ingest.0", fd, writable=True), "ingest.0")
    reader = Arrays(mapped("ingest.0", fd, writable=False), "schedule.0")
    os.close(fd)
    return writer, reader


DTYPES = st.sampled_from([np.int32, np.uint8, np.uint32, np.uint64, np.float32, np.bool_])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_an_array_of_any_size_shape_and_type_arrives_unchanged(data):
    fd = segment.create("ingest", NUM_BYTES)
    writer = Arrays(mapped("ingest.0", fd, writable=True), "ingest.0")
    reader = Arrays(mapped("ingest.0", fd, writable=False), "schedule.0")
    os.close(fd)
    dtype = data.draw(DTYPES)
    arrays = data.draw(st.lists(hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=60))))
    arrays += [np.tile(array.T, (3, 1)).T for array in arrays]  # also arrays that are not contiguous
    for array in arrays:
        taken = reader.take(writer.put(array, readers=READERS), dtype)
        np.testing.assert_array_equal(taken, array.reshape(-1))
    for owner, release in reader.releases():
        assert owner == "ingest.0"
        writer.released(release)
    assert writer.arena is not None and writer.arena.num_live == 0


@pytest.mark.parametrize("num", [0, 1, 5000])
@pytest.mark.parametrize(("code", "dtype"), [("B", np.uint8), ("i", np.int32), ("Q", np.uint64)])
def test_an_array_arrives_as_a_list(pair, code, dtype, num):
    writer, reader = pair
    array = np.random.default_rng(num).integers(0, np.iinfo(dtype).max, num, dtype, endpoint=True)
    assert reader.take_list(writer.put(array, readers=READERS), code) == array.tolist()
    for _, release in reader.releases():
        writer.released(release)
    assert writer.arena is not None and writer.arena.num_live == 0


def test_small_arrays_are_inline_and_large_ones_by_reference(pair):
    writer, _ = pair
    assert isinstance(writer.put(np.zeros(INLINE_BYTES, np.uint8), readers=READERS), bytes)
    assert isinstance(writer.put(np.zeros(INLINE_BYTES + 1, np.uint8), readers=READERS), ShmRef)


def test_a_slab_is_held_until_its_release_arrives(pair):
    writer, reader = pair
    array = writer.put(np.arange(5000, dtype=np.int32), readers=READERS)
    reader.take(array, np.int32)
    assert writer.arena.num_live == 1
    [(_, release)] = reader.releases()
    assert reader.releases() == []
    writer.released(release)
    assert writer.arena is not None and writer.arena.num_live == 0


def test_an_array_of_an_unsent_message_can_be_taken_back(pair):
    writer, _ = pair
    writer.retract(writer.put(np.arange(5000, dtype=np.int32), readers=READERS))
    writer.retract(writer.put(np.arange(5, dtype=np.int32), readers=READERS))
    assert writer.arena is not None and writer.arena.num_live == 0
    assert writer.arena.num_bytes_free == NUM_BYTES


def test_all_arrays_of_an_unsent_message_can_be_taken_back(pair):
    writer, _ = pair
    big = np.arange(5000, dtype=np.int32)
    fields = {
        name: writer.put(big, readers=READERS)
        for name in ("seqs", "starts", "counts", "ids", "finishes", "token_outputs")
    }
    message = m.Settled(**fields)
    assert writer.arena.num_live == 6
    writer.retract_all(message)
    assert writer.arena is not None and writer.arena.num_live == 0


def test_a_received_array_is_a_copy(pair):
    writer, reader = pair
    array = writer.put(np.arange(5000, dtype=np.int32), readers=READERS)
    taken = reader.take(array, np.int32)
    [(_, release)] = reader.releases()
    writer.released(release)
    writer.put(np.zeros(5000, np.int32), readers=READERS)
    assert taken[4999] == 4999


def test_a_stage_without_an_arena_sends_everything_inline(pair):
    _, reader = pair
    array = np.arange(5000, dtype=np.int32)
    assert reader.put(array, readers=READERS) == array.tobytes()
    with pytest.raises(AssertionError, match="without an arena"):
        reader.released(m.Release([0], [1], "writer.0"))


def test_a_reference_beyond_the_segment_is_an_error(pair):
    _, reader = pair
    with pytest.raises(AssertionError, match="beyond its segment"):
        reader.take(ShmRef("ingest.0", NUM_BYTES - 4, 8, 1), np.int32)


def test_a_release_that_cannot_be_sent_goes_with_the_next(tmp_path):
    """The scheduler does not exist yet and its edge holds one message: the second release must wait, not get lost."""
    import zmq

    from pipeline.config.settings import Settings
    from pipeline.runtime.transport.inbox import address_of
    from tests.runtime.transport.channels import until

    server = f"stage-{os.getpid()}"
    address = {name: address_of(server, name, 1) for name in ("supervisor.0", "schedule.0", "detokenize.0")}
    fd = segment.create("schedule", NUM_BYTES)
    writer = Arrays(mapped("schedule.0", fd, writable=True), "schedule.0")
    stage = open_stage(
        m.Launch(
            stage="detokenize",
            replica=0,
            rank=0,
            incarnation=1,
            entry="",
            settings=Settings(),
            model_dir=str(tmp_path),
            address=address["detokenize.0"],
            peers=[
                m.PeerInbox("supervisor.0", address["supervisor.0"], 1),
                m.PeerInbox("schedule.0", address["schedule.0"], 1),
            ],
            segments=[m.Segment("schedule.0", fd, NUM_BYTES, writable=False)],
            death_fd=-1,
        ),
        m.DetokenizeInbox,
    )
    os.close(fd)
    for _ in range(4):
        stage.arrays.take(writer.put(np.arange(5000, dtype=np.int32), readers=("detokenize.0",)), np.int32)
        stage.release()
    assert stage.outbox("schedule").num_refused == 3
    context = zmq.Context()
    inbox = Inbox(context, address["schedule.0"], m.ScheduleInbox)

    def all_released():
        stage.release()
        for release in inbox.wait_all(0.01):
            writer.released(release)
        return writer.arena is not None and writer.arena.num_live == 0

    until(all_released)
    stage.close()
    inbox.close()
    context.term()
