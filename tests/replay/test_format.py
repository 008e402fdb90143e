"""The file of a recording: invalid files, damage, and limits that end a recording."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.replay import recorder
from pipeline.replay.arrays import copies, refs
from pipeline.replay.compare import compare
from pipeline.replay.recorder import FileWriter, RecordingContext
from pipeline.runtime import messages as m
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import ShmRef
from pipeline.version import VERSION

LOG = logging.getLogger("test")


def header(**changes: Any) -> f.Header:
    settings = msgspec.Raw(msgspec.msgpack.encode(Settings()))
    plain = f.Header(f.FORMAT, "0", "schedule", 0, 0, 1, True, True, settings, "", ["supervisor.0"], [])
    return msgspec.structs.replace(plain, **changes)


def wake(*messages: Any) -> f.LoopTurn:
    bodies = [msgspec.msgpack.encode(message) for message in messages]
    return f.LoopTurn(5, ["a.0"] * len(bodies), [1] * len(bodies), bodies, [[] for _ in bodies])


def file_of(path: Path, *structs: Any) -> Path:
    path.write_bytes(f.MAGIC + b"".join(map(f.frame, structs)))
    return path


def read(path: Path) -> tuple[list[f.Entry], str, f.End | None]:
    with f.RecordingReader(path) as reader:
        entries = list(reader)
        return entries, reader.flaw, reader.end


def test_written_entries_can_be_read(tmp_path: Path) -> None:
    entries = [
        wake(m.Ping(1), m.Stop()),
        f.Value("time", 1.5),
        f.ObservedEvent("leave", 2**63, b"x"),
        f.SendRefused("a.0"),
    ]
    sent = f.Sent("a.0", b"\x01", [b"abc"])
    path = file_of(tmp_path / "r", header(), *entries, sent, f.End("enough", {"x": 1}))
    assert read(path) == ([*entries, sent], "", f.End("enough", {"x": 1}))


def test_settings_of_an_older_version_are_read_by_their_old_names() -> None:
    tree = msgspec.to_builtins(Settings())
    tree["schedule"]["depth"] = tree["schedule"].pop("max_steps_in_flight") + 2
    tree["execute"]["threads"] = tree["execute"].pop("num_threads") + 3
    settings = f.settings_of(header(settings=msgspec.Raw(msgspec.msgpack.encode(tree))))
    assert (settings.schedule.max_steps_in_flight, settings.execute.num_threads) == (2, 3)
    assert settings == msgspec.structs.replace(
        Settings(),
        schedule=msgspec.structs.replace(Settings().schedule, max_steps_in_flight=2),
        execute=msgspec.structs.replace(Settings().execute, num_threads=3),
    )


@pytest.mark.parametrize("data", [b"", b"PL", b"\x7fELF" + bytes(100), b"GGUF" + bytes(100), b"PLRECORX" + bytes(100)])
def test_a_foreign_file_is_rejected_with_a_clear_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(UserError, match="is not a recording of `pipeline record`: wrong magic bytes"):
        f.RecordingReader(tmp_path / "r")


def test_missing_files_folders_and_invalid_names_are_rejected_with_a_clear_error(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), (Path("a\0b"), "null")):
        with pytest.raises(UserError, match=words):
            f.RecordingReader(path)


def test_another_format_or_an_invalid_header_is_rejected_with_a_clear_error(tmp_path: Path) -> None:
    for other in (f.FORMAT - 1, f.FORMAT + 1):
        words = rf"has recording format {other}, and this version, {VERSION}, replays format {f.FORMAT}: .* it, 0$"
        with pytest.raises(UserError, match=words):
            f.RecordingReader(file_of(tmp_path / "r", header(format=other)))
    data = f.frame(header())
    for nonsense in (b"\xc1", b"\x90", b"\x93\x03\x02\x03", msgspec.msgpack.encode([f.FORMAT, "x"])):
        framed = f._HEAD.pack(len(nonsense), __import__("zlib").crc32(nonsense)) + nonsense
        (tmp_path / "r").write_bytes(f.MAGIC + framed)
        with pytest.raises(UserError, match="its header can't be read"):
            f.RecordingReader(tmp_path / "r")
    (tmp_path / "r").write_bytes(f.MAGIC + data[:-3])
    with pytest.raises(UserError, match="is empty: it is truncated"):
        f.RecordingReader(tmp_path / "r")


def test_settings_and_times_of_a_damaged_file_are_rejected_with_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the recording's settings, of version .*, are not valid"):
        f.settings_of(header(settings=msgspec.Raw(b"\x81\xa2\xff\xfe\x01")))
    for seconds in (float("inf"), float("nan")):
        path = file_of(tmp_path / "r", header())
        with path.open("ab") as file:
            file.write(f.number_frame(f.TURN, seconds))
        with pytest.raises(UserError, match=r"an entry before byte .* can't be read: cannot convert float"):
            read(path)


def test_a_truncated_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    structs: list[f.Header | f.Entry] = [header(), wake(m.Ping(1)), wake(m.Ping(2)), f.End("enough")]
    frames = [f.frame(one) for one in structs]
    whole = f.MAGIC + b"".join(frames)
    ends = np.cumsum([len(f.MAGIC), *map(len, frames)]).tolist()
    for length in range(ends[1], len(whole)):
        (tmp_path / "r").write_bytes(whole[:length])
        entries, flaw, end = read(tmp_path / "r")
        assert len(entries) == sum(length >= one for one in ends[2:4])
        assert end is None
        assert "it is truncated" in flaw
    (tmp_path / "r").write_bytes(whole)
    assert read(tmp_path / "r")[1:] == ("", f.End("enough"))


def test_damage_is_reported_and_ends_the_entries(tmp_path: Path) -> None:
    first, second = f.frame(wake(m.Ping(1))), f.frame(wake(m.Ping(2)))
    begin = f.MAGIC + f.frame(header())
    spoilt = bytearray(second)
    spoilt[-1] ^= 1
    (tmp_path / "r").write_bytes(begin + first + spoilt + first)
    entries, flaw, _ = read(tmp_path / "r")
    assert len(entries) == 1
    assert flaw == f"it is damaged at byte {len(begin) + len(first)}; what follows is ignored"
    (tmp_path / "r").write_bytes(begin + b"\xff" * 8)
    assert "damaged" in read(tmp_path / "r")[1]


def test_arrays_are_found_anywhere_in_a_message() -> None:
    one, two, three = (ShmRef("x", 64 * i, 3, 1) for i in range(3))
    memories = Memories()
    memories.add("x", memoryview(b"".join(bytes([65 + i]) * 64 for i in range(3))))
    add = m.RowAdd(0, 0, 0, two, 3, three, msgspec.Raw(b"\xc0"))
    step = m.Step(1, 1, one, [add, add], b"", b"", b"", b"", b"", b"")
    assert refs(step) == [one, two, three, two, three]
    assert copies(step, memories) == [b"AAA", b"BBB", b"CCC", b"BBB", b"CCC"]
    ids = m.Submit(1, 1, 0, 0.0, m.IdsPrompt(two), m.GenerationOptions())
    assert refs(ids) == [two]
    some = m.Admit(1, 1, 0, 0.0, one, msgspec.Raw(b"\xc0"), [b"inline", two, three])
    assert refs(some) == [one, two, three]
    assert refs(m.Release([64], [1], "x")) == []


def context_for(path: Path, **order: Any) -> RecordingContext:
    return RecordingContext(m.Record(0, str(path), **order), header(), Memories(), LOG)


def feed(replay_context: RecordingContext, num: int) -> None:
    for i in range(num):
        replay_context.received("a.0", 1, msgspec.msgpack.encode(m.Ping(i)), m.Ping(i))
        replay_context.end_turn()


def test_a_recording_ends_at_its_size_limit_and_the_stage_continues(tmp_path: Path) -> None:
    replay_context = context_for(tmp_path / "r", max_bytes=4096)
    feed(replay_context, 1000)
    assert replay_context.is_over
    replay_context.close()
    entries, flaw, end = read(tmp_path / "r")
    assert (tmp_path / "r").stat().st_size < 4096 + 200
    assert 10 < len(entries) < 1000
    assert (flaw, end) == ("", f.End("it reached its size limit"))


def test_a_recording_ends_at_its_time_limit(tmp_path: Path) -> None:
    replay_context = context_for(tmp_path / "r", max_s=0.02)
    end = time.monotonic() + 5
    while not replay_context.is_over:
        assert time.monotonic() < end
        feed(replay_context, 1)
    replay_context.close()
    assert read(tmp_path / "r")[2] == f.End("it reached its time limit")


def test_a_recording_without_a_keepalive_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    replay_context = context_for(tmp_path / "r", lease_s=6.0)
    for _ in range(3):
        clock[0] += 5
        feed(replay_context, 1)
        replay_context.keep()
    assert not replay_context.is_over
    clock[0] += 6.5
    feed(replay_context, 3)
    assert replay_context.is_over
    replay_context.close()
    entries, _, end = read(tmp_path / "r")
    assert sum(isinstance(one, f.LoopTurn) for one in entries) == 3, "later turns are not recorded"
    assert end == f.End("its command was not heard from for 6 s")


def test_a_full_disk_ends_the_recording_and_not_the_stage(caplog: pytest.LogCaptureFixture) -> None:
    replay_context = context_for(Path("/dev/full"))
    end = time.monotonic() + 5
    while not replay_context.is_over:
        assert time.monotonic() < end
        feed(replay_context, 1)
    [line] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "No space left on device" in line.__dict__["fields"]["why"], "it is said at once, not when the stage ends"
    with caplog.at_level(logging.ERROR, "test"):
        replay_context.close()
    assert "No space left on device" in caplog.text


def test_a_stalled_disk_does_not_block_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    write = FileWriter._write

    def stalled_write(self: FileWriter, data: bytes) -> None:
        assert released.wait(20)
        write(self, data)

    monkeypatch.setattr(FileWriter, "_write", stalled_write)
    monkeypatch.setattr(recorder, "MAX_PENDING_BYTES", 10_000)
    replay_context = context_for(tmp_path / "r")
    feed(replay_context, 1000)
    assert replay_context.is_over, "it does not wait for the disk"
    released.set()
    replay_context.close()
    entries, _, end = read(tmp_path / "r")
    assert end == f.End("the disk was too slow")
    assert 10 < len(entries) < 1000


def test_written_entries_survive_a_crash(tmp_path: Path) -> None:
    replay_context = context_for(tmp_path / "r")
    feed(replay_context, 20)
    end = time.monotonic() + 5
    while replay_context._writer.num_pending_bytes:
        assert time.monotonic() < end
        time.sleep(0.001)
    entries, flaw, _ = read(tmp_path / "r")  # it is not closed
    assert len(entries) == 20
    assert flaw == "it is truncated: it has no end"
    replay_context.close()


def test_wakes_are_recorded_as_the_inbox_returned_them(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = address_of(f"test-{tmp_path.name}", "schedule.0", 1)
    inbox: Inbox[Any] = Inbox(context, address, m.ScheduleInbox)
    outbox: Outbox[Any] = Outbox(context, address, m.Envelope("gateway.0", 3), 100)
    inbox.replay_context = context_for(tmp_path / "r")
    outbox.replay_context, outbox.peer = inbox.replay_context, "schedule.0"
    try:
        for nonce in range(3):
            outbox.send(m.Ping(nonce))
        assert inbox.wait(5)
        first = inbox.receive()
        others: list[Any] = []
        while len(others) < 2:
            others += inbox.wait_all(5)
        inbox.wait_all(0)
    finally:
        inbox.replay_context.close()
        inbox.close()
        outbox.close()
        context.term()
    assert [first, *others] == [m.Ping(0), m.Ping(1), m.Ping(2)]
    entries, _, _ = read(tmp_path / "r")
    wakes = [one for one in entries if isinstance(one, f.LoopTurn)]
    assert len(wakes[0].bodies) == 1
    assert len(wakes[-1].bodies) == 0, "a wait that times out is a turn, too"
    assert sum(len(one.bodies) for one in wakes) == 3
    assert {(s, i) for one in wakes for s, i in zip(one.senders, one.incarnations, strict=True)} == {("gateway.0", 3)}
    assert sum(isinstance(one, f.Sent) for one in entries) == 3


def test_a_difference_is_reported_with_its_place_and_both_messages(tmp_path: Path) -> None:
    sent = [f.Sent("a.0", msgspec.msgpack.encode(m.Ping(i)), []) for i in range(3)]
    ours = file_of(tmp_path / "ours", header(), *sent, f.End(""))
    other = file_of(tmp_path / "other", header(), sent[0], f.Sent("b.0", sent[1].body, []), sent[2], f.End(""))
    short = file_of(tmp_path / "short", header(), *sent[:2], f.End(""))
    cut = file_of(tmp_path / "cut", header(), *sent[:2])
    arrays = file_of(tmp_path / "arrays", header(), *sent[:2], f.Sent("a.0", sent[2].body, [b"x"]), f.End(""))
    assert compare(ours, ours).are_same
    assert compare(ours, other).difference == "message 2: to a.0: ['ping', 1], expected to b.0: ['ping', 1]"
    assert compare(ours, short).difference == "message 3: to a.0: ['ping', 2], expected nothing"
    assert compare(short, ours).difference == "message 3: nothing, expected to a.0: ['ping', 2]"
    assert compare(ours, cut).are_same, "the entries after the cut are ignored"
    assert compare(ours, cut).num_same == 2
    assert not compare(ours, arrays).are_same
