"""The stage between a fake schedule and fake gateways, over real sockets."""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pipeline.config.settings import Settings
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import Pooler
from pipeline.runtime.stage import Stage
from pipeline.runtime.tracing import StageTrace
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import Array, ShmRef
from pipeline.stages.detokenize.stage import RETRY_S, DetokenizeStage
from pipeline.text.vocabulary import Vocabulary
from tests.rig import Rig
from tests.runtime.transport.channels import until
from tests.stages.detokenize.test_output_processor import FakeGateway, ids_of, opening
from tests.stages.detokenize.vocabularies import byte_level, save

FACTS = m.ExecuteFacts(num_blocks=8, block_size=16, max_model_len=128, vocab_size=420, hidden_size=3)


@pytest.fixture
def model_dir(tmp_path):
    save(byte_level(), tmp_path)
    return tmp_path


@pytest.fixture
def rig(model_dir):
    with Rig("detokenize", model_dir=model_dir) as rig:
        rig.start(FACTS)
        yield rig


def settled(entries: Sequence[tuple[int, int, list[int], int]], put=lambda array: array.tobytes()) -> m.Settled:
    """A message of (seq, start, ids, finish) entries."""
    seqs, starts, ids, finishes = zip(*entries, strict=True)
    return m.Settled(
        seqs=put(np.array(seqs, np.uint64)),
        starts=put(np.array(starts, np.int32)),
        counts=put(np.array([len(part) for part in ids], np.int32)),
        ids=put(np.array([token_id for part in ids for token_id in part], np.int32)),
        finishes=put(np.array(finishes, np.uint8)),
    )


def send(rig: Rig, message: m.Open | m.Settled | m.Reject) -> None:
    rig.send(message, sender="schedule.0")


def receive_until_closed(rig: Rig, *seqs: int) -> FakeGateway:
    client = FakeGateway()
    while not set(seqs) <= set(client.closing):
        client.take(rig.receive("gateway", m.Deltas))
    return client


def test_ids_become_text_and_the_last_entry_has_the_finish_reason(rig):
    send(rig, opening(1))
    send(rig, settled([(1, 0, ids_of("hello "), m.Finish.NONE)]))
    send(rig, settled([(1, 6, ids_of("🤖"), m.Finish.LENGTH)]))
    client = receive_until_closed(rig, 1)
    assert (client.text[1], client.ids[1]) == ("hello 🤖", ids_of("hello 🤖"))
    assert client.closing[1] == (m.Finish.LENGTH, None)
    assert rig.load() == m.PlainLoad(0)


def test_a_wake_sends_one_message_with_one_entry_for_each_sequence(rig):
    for seq in range(3):
        send(rig, opening(seq))
    rig.until(lambda load: load.num_open == 3)
    send(rig, settled([(seq, 0, ids_of("ab"), m.Finish.NONE) for seq in range(3)]))
    deltas = rig.receive("gateway")
    assert deltas.texts == ["ab"] * 3
    assert deltas.num_ids == [2] * 3


def test_the_text_continues_after_the_prompt(rig):
    character = ids_of("🤖")
    send(rig, opening(1, tail=[*ids_of("x"), *character[:2]]))
    send(rig, settled([(1, 0, character[2:], m.Finish.LENGTH)]))
    assert receive_until_closed(rig, 1).text[1] == "🤖"


def test_a_stop_string_is_reported_to_gateway_and_schedule_and_the_closing_is_dropped(rig):
    send(rig, opening(1, m.GenerationOptions(stop=["stop"])))
    send(rig, settled([(1, 0, ids_of("go stop and"), m.Finish.NONE)]))
    client = receive_until_closed(rig, 1)
    assert (client.text[1], client.ids[1]) == ("go ", ids_of("go stop"))
    assert client.closing[1] == (m.Finish.STOP, "stop")
    assert rig.receive("schedule", m.Abort) == m.Abort(1001, 2, 1, m.Finish.STOP)
    assert rig.load().num_open == 1
    send(rig, settled([(1, 11, ids_of(" more"), m.Finish.STOP)]))
    rig.until(lambda load: load.num_open == 0)
    assert rig.nothing("gateway")
    assert rig.nothing("schedule")


def test_a_rejection_is_forwarded(rig):
    failure = m.Failure(503, "too much is waiting")
    send(rig, m.Reject(77, 3, 0, failure))
    assert rig.receive("gateway") == m.Rejected(77, 3, failure)


def test_large_arrays_in_shared_memory_are_read_and_released(rig):
    num = 2000
    arena = rig.arena("schedule.0")
    for seq in range(num):
        send(rig, opening(seq))

    def put(array: np.ndarray) -> Array:
        return arena.put(array.data.cast("B"), readers=("detokenize.0",))

    message = settled([(seq, 0, ids_of("ab"), m.Finish.LENGTH) for seq in range(num)], put)
    assert isinstance(message.ids, ShmRef)
    assert isinstance(message.seqs, ShmRef)
    num_live = arena.num_live
    send(rig, message)
    client = receive_until_closed(rig, *range(num))
    assert set(client.text.values()) == {"ab"}
    num_released = 0
    while num_released < num_live:
        release = rig.receive("schedule", m.Release)
        for offset, generation in zip(release.offsets, release.generations, strict=True):
            assert arena.release(offset, generation, "detokenize.0")
            num_released += 1
    assert arena.num_live == 0


def test_everything_received_before_stop_is_sent(model_dir):
    with Rig("detokenize", model_dir=model_dir) as rig:
        rig.start(FACTS)
        send(rig, opening(1))
        rig.until(lambda load: load.num_open == 1)
        send(rig, settled([(1, 0, ids_of("ab"), m.Finish.LENGTH)]))
        client = receive_until_closed(rig, 1)
    assert client.text[1] == "ab"


def test_a_broken_invariant_ends_the_stage(model_dir):
    with (
        pytest.raises(AssertionError, match="sequence 9 is not open"),
        Rig("detokenize", model_dir=model_dir) as rig,
    ):
        rig.start(FACTS)
        send(rig, settled([(9, 0, [5], m.Finish.NONE)]))
        rig.receive("gateway")


def test_a_model_that_generates_no_text_needs_no_vocabulary(tmp_path):
    save(byte_level(), tmp_path, Pooler(pooling="mean", width=3))
    (tmp_path / "tokenizer.json").unlink()
    with Rig("detokenize", model_dir=tmp_path) as rig:
        rig.start(FACTS)
        one = opening(1, m.GenerationOptions(max_tokens=1, pooling=m.Pooling.MEAN))
        vector = bytes(range(one.token_output_bytes))
        send(rig, one)
        send(rig, msgspec.structs.replace(settled([(1, 0, [7], m.Finish.LENGTH)]), token_outputs=vector))
        deltas = rig.receive("gateway", m.Deltas)
        assert (deltas.texts, deltas.ids) == ([""], np.array([7], np.int32).tobytes())
        assert vector and deltas.token_outputs == [vector]


def test_an_unsupported_tokenizer_is_rejected_with_an_error_that_names_it(tmp_path):
    tokenizer = byte_level().from_str(byte_level().to_str())
    tokenizer.decoder = None
    save(tokenizer, tmp_path)
    with pytest.raises(ValueError, match="is not supported"), Rig("detokenize", model_dir=tmp_path) as rig:
        rig.receive("supervisor", m.Ready)


def test_output_is_merged_and_sent_later_if_a_socket_is_full(model_dir, monkeypatch):
    """Neither gateway nor schedule exists yet, and their edges hold one message each."""
    server = f"detokenize-{os.getpid()}"
    names = ("supervisor.0", "gateway.0", "schedule.0", "detokenize.0")
    address = {name: address_of(server, name, 1) for name in names}
    launch = m.Launch(
        stage="detokenize",
        replica=0,
        rank=0,
        incarnation=1,
        entry="",
        settings=Settings(),
        model_dir=str(model_dir),
        address=address["detokenize.0"],
        peers=[m.PeerInbox(name, address[name], 1) for name in names[:3]],
        segments=[],
        death_fd=-1,
    )
    stage: Stage[m.DetokenizeInbox] = open_stage(launch, m.DetokenizeInbox)
    detokenize = DetokenizeStage(stage, Vocabulary.load(model_dir / "tokenizer.json"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    schedule: Outbox[m.DetokenizeInbox] = Outbox(context, stage.launch.address, m.Envelope("schedule.0", 1), 1000)

    def turn_with(message: m.DetokenizeInbox) -> None:
        num = stage.inbox.num_received
        assert schedule.send(message)
        until(lambda: detokenize.turn() or stage.inbox.num_received > num)

    stop = m.GenerationOptions(stop=["."])
    text = "one two three"
    for seq in range(3):
        turn_with(opening(seq, stop))
    for index, token_id in enumerate(ids_of(text)):
        turn_with(settled([(seq, index, [token_id], m.Finish.NONE) for seq in range(3)]))
    turn_with(m.Reject(77, 3, 0, m.Failure(503, "full")))
    turn_with(settled([(seq, len(text), ids_of("."), m.Finish.NONE) for seq in range(3)]))
    assert stage.outbox("gateway").num_sent == 1
    assert stage.outbox("gateway").num_refused > 0
    waits_s: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(stage.inbox, "wait_all", lambda timeout_s: waits_s.append(timeout_s) or [])
        detokenize.turn()
    assert waits_s == [RETRY_S], "it waits only until the next retry"

    inboxes: dict[str, Inbox[Any]] = {
        "gateway": Inbox(context, address["gateway.0"], m.GatewayInbox),
        "schedule": Inbox(context, address["schedule.0"], m.ScheduleInbox),
    }
    client, others = FakeGateway(), []

    def all_received() -> bool:
        assert schedule.send(m.Ping(0))  # so that a turn with nothing left to send ends
        detokenize.turn()
        for inbox in inboxes.values():
            for message in inbox.receive_all():
                if isinstance(message, m.Deltas):
                    client.take(message)
                else:
                    others.append(message)
        return len(client.closing) == 3 and len(others) == 4

    until(all_received)
    assert client.text == dict.fromkeys(range(3), text)
    assert client.ids == dict.fromkeys(range(3), ids_of(text + "."))
    assert m.Rejected(77, 3, m.Failure(503, "full")) in others
    assert sum(isinstance(message, m.Abort) for message in others) == 3
    assert stage.outbox("gateway").num_sent <= 4, "unsent output was not merged"
    stage.close()
    for inbox in inboxes.values():
        inbox.close()
    schedule.close()
    context.term()


def test_schedule_forwards_the_options_of_the_gateway(rig):
    """They are the same bytes, inside of the message."""
    options = m.GenerationOptions(
        stop=["\n"], include_stop_str_in_output=True, skip_special_tokens=False, stop_token_ids=[3]
    )
    admit = m.Admit(5, 0, 0, 0.0, b"", opening(5, options).options)
    passed_on = msgspec.msgpack.decode(msgspec.msgpack.encode(admit), type=m.Admit).options
    send(rig, m.Open(5, 1005, 2, 2, 0, b"", passed_on))
    send(rig, settled([(5, 0, ids_of("a\nb"), m.Finish.NONE)]))
    client = receive_until_closed(rig, 5)
    assert (client.text[5], client.closing[5]) == ("a\n", (m.Finish.STOP, "\n"))


def test_embeddings_are_forwarded_as_records(rig):
    send(rig, opening(1, m.GenerationOptions(pooling=m.Pooling.LAST)))
    send(rig, opening(2, m.GenerationOptions(pooling=m.Pooling.MEAN)))
    embeddings = [np.arange(begin, begin + 3, dtype="<f4").tobytes() for begin in (0, 3)]
    entries = [(1, 0, ids_of("a"), m.Finish.LENGTH), (2, 0, ids_of("b"), m.Finish.LENGTH)]
    send(rig, msgspec.structs.replace(settled(entries), token_outputs=b"".join(embeddings)))
    assert rig.receive("gateway", m.Deltas).token_outputs == embeddings


def test_resumed_ids_are_read_from_shared_memory_and_only_new_output_is_sent(rig):
    arena = rig.arena("schedule.0")
    known = ids_of("ab☔" * 500)[:-1]
    array = arena.put(np.array(known, np.int32).data.cast("B"), readers=("detokenize.0",))
    assert isinstance(array, ShmRef)
    send(rig, msgspec.structs.replace(opening(1), outputs=array))
    send(rig, settled([(1, len(known), ids_of("☔!")[2:], m.Finish.LENGTH)]))
    deltas = rig.receive("gateway", m.Deltas)
    assert (deltas.texts, deltas.text_offsets, deltas.id_offsets) == (["☔!"], [1499], [len(known)])
    release = rig.receive("schedule", m.Release)
    assert arena.release(release.offsets[0], release.generations[0], release.reader)
    assert arena.num_live == 0


def test_a_stop_string_in_resumed_output_ends_the_sequence_at_once(rig):
    options = m.GenerationOptions(stop=["END"])
    known = np.array(ids_of("the END"), np.int32).tobytes()
    send(rig, msgspec.structs.replace(opening(1, options), outputs=known))
    deltas = rig.receive("gateway", m.Deltas)
    assert (deltas.finishes, deltas.stop_reasons, deltas.texts, deltas.num_ids) == ([m.Finish.STOP], ["END"], [""], [0])
    assert rig.receive("schedule", m.Abort) == m.Abort(1001, 2, 1, m.Finish.STOP)
    send(rig, settled([(1, 7, [], m.Finish.STOP)]))
    rig.until(lambda load: load.num_open == 0)
    assert rig.nothing("gateway", 0)


def test_a_trace_marks_a_request_where_its_text_begins_and_where_it_ends(rig):
    rig.send(m.Trace(1, 60.0))
    for seq in (1, 2):
        send(rig, opening(seq))
    both = settled([(1, 0, ids_of("a"), m.Finish.NONE), (2, 0, ids_of("b"), m.Finish.NONE)])
    send(rig, msgspec.structs.replace(both, firsts=[m.FirstTimes(1, 1.0, 2.0, 3.0, 2)]))
    send(rig, settled([(1, 1, ids_of("a"), m.Finish.LENGTH), (2, 1, ids_of("b"), m.Finish.NONE)]))
    send(rig, settled([(2, 2, ids_of("b"), m.Finish.LENGTH)]))
    receive_until_closed(rig, 1, 2)
    rig.send(m.TakeTrace(2))
    while (answer := rig.receive("supervisor", m.Answer)).nonce != 2:
        pass
    spans = msgspec.msgpack.decode(answer.body, type=StageTrace).records
    assert [one.requests for one in spans if one.name == "text"] == [[1002], [1001], [1002]]
