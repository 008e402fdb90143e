"""The media process, with images of our own."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from pipeline.media import decoder, images
from pipeline.media.decoder import MediaDecoder
from pipeline.media.jobs import Decoded, DecodeJob, key_of
from pipeline.media.limits import LIMITS, ImageLimits
from pipeline.runtime.workers import forked_jobs
from pipeline.runtime.workers.worker import LENGTH, WorkerLostError, receive
from tests.media.model_files import LLAVA

PATIENCE_S = 240.0


def png(width: int = 90, height: int = 70) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def answers(tmp_path: Path, *data: bytes, timeout_s: float = PATIENCE_S) -> list[tuple[Decoded, bytes]]:
    """What the process answers, in the order of its answers, with what the memfd has then."""
    config = LLAVA.read(tmp_path)
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)

    def serve() -> None:
        with theirs, pytest.raises(WorkerLostError):
            MediaDecoder(theirs, config, 2, timeout_s).loop()

    thread = threading.Thread(target=serve)
    thread.start()
    found, fds = [], []
    with ours:
        for number, each in enumerate(data):
            fds.append(os.memfd_create("image", os.MFD_CLOEXEC))
            os.write(fds[-1], each)
            job = msgspec.msgpack.encode(DecodeJob(number, len(each), LIMITS, time.monotonic()))
            socket.send_fds(ours, [LENGTH.pack(len(job)) + job], [fds[-1]])
        for _ in data:
            answer = msgspec.msgpack.decode(receive(ours), type=Decoded)
            fd = fds[answer.number]
            found.append((answer, os.pread(fd, os.fstat(fd).st_size, 0)))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    for fd in fds:
        os.close(fd)
    return found


def instead(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Have decoding do something else with small images."""
    original = images.decode

    def decode(data: bytes, limits: ImageLimits) -> Image.Image:
        if len(data) < 10:
            work()
        return original(data, limits)

    monkeypatch.setattr(images, "decode", decode)


def burn() -> None:
    while True:
        pass


def test_the_pixels_are_in_the_memfd_in_place_of_the_bytes(tmp_path: Path):
    ((answer, memory),) = answers(tmp_path, png())
    pixels = np.frombuffer(memory, np.uint8).reshape(answer.shape)
    assert answer.shape == (1, 3, 56, 56)
    assert answer.run_lengths == (16,)
    assert np.array_equal(pixels[0, :, 0, 0], [255, 0, 0])


def test_children_have_the_lowest_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Streams need the cores more. Later, none gets a higher one (`forked_jobs.LOW_PRIORITY`)."""
    found = tmp_path / "priority"

    def look() -> None:
        time.sleep(2 * forked_jobs.SHORT_S)  # the process lowers that of slow jobs
        found.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))

    instead(monkeypatch, look)
    monkeypatch.setattr(forked_jobs, "SHORT_S", 0.05)
    answers(tmp_path, b"look")
    assert found.read_text() == "19"


def test_an_image_that_takes_too_long_is_ended_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    instead(monkeypatch, burn)  # images that can be decoded take less than forked_jobs.MIN_CPU_S
    found = {answer.number: answer for answer, _ in answers(tmp_path, b"slow", png(), png(), timeout_s=0.4)}
    assert found[0].error == "takes longer than 0.4 s to decode"
    assert found[0].is_final
    assert found[0].took_s > 0
    assert not found[1].error and not found[2].error


def test_an_image_that_takes_too_much_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "MAX_BYTES", 2**26)
    instead(monkeypatch, lambda: bytes(2**27))
    ((answer, _), (good, _)) = sorted(answers(tmp_path, b"large", png()), key=lambda each: each[0].number)
    assert answer.error == "takes too much memory to decode"
    assert not good.error


def test_a_large_image_has_the_memory_that_its_pixels_need(tmp_path: Path):
    """Turned and with alpha, as the largest one that is allowed."""
    side = int(LIMITS.max_pixels**0.5)
    exif = Image.Exif()
    exif[images.ORIENTATION] = 5
    file = BytesIO()
    Image.new("LA", (side, side), (9, 128)).save(file, "PNG", exif=exif, compress_level=1)
    ((answer, _),) = answers(tmp_path, file.getvalue())
    assert not answer.error


@pytest.mark.parametrize(("number", "is_final"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
def test_a_crash_of_a_library_is_an_error_of_its_image(
    number: signal.Signals, is_final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """If the machine's memory runs out, the kernel kills: that says nothing of the image."""
    instead(monkeypatch, lambda: os.kill(os.getpid(), number))
    ((answer, _), (good, _)) = sorted(answers(tmp_path, b"crash", png()), key=lambda each: each[0].number)
    assert answer.error == f"can't be decoded: the process that decodes it was ended by {number.name}"
    assert answer.is_final == is_final
    assert not good.error


@pytest.mark.parametrize(
    ("error", "words"), [(MemoryError(), "takes too much memory to decode"), (KeyError("a"), "can't be decoded")]
)
def test_a_child_that_fails_outside_of_decoding_says_why(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fails(*_: object) -> Decoded:
        raise error

    monkeypatch.setattr(decoder, "decoded", fails)
    ((answer, _),) = answers(tmp_path, png())
    assert answer.error == words
    assert ("KeyError" in capfd.readouterr().err) == isinstance(error, KeyError)


def test_a_child_has_no_descriptor_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its image, the pipe for its answer, and the standard streams."""
    mine = os.open(os.devnull, os.O_RDONLY)

    def look() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(mine)
        kinds = []
        for path in [path for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2]:
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
                kinds.append(str(path.readlink()).partition(":")[0])
        if sorted(kinds) != ["/memfd", "pipe"]:
            burn()

    instead(monkeypatch, look)
    ((answer, _),) = answers(tmp_path, b"look", timeout_s=2.0)
    os.close(mine)
    assert answer.error.startswith("is in no format")


def test_a_child_can_t_write_files_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "MAX_PIXEL_BYTES", 1000)
    ((answer, _),) = answers(tmp_path, png())
    assert answer.error


def test_a_fault_of_ours_is_in_the_log_and_not_in_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    instead(monkeypatch, lambda: {"a": 1}["b"])
    ((answer, _),) = answers(tmp_path, b"fault")
    assert answer.error == "can't be decoded"
    assert "KeyError" in capfd.readouterr().err


def test_keys_depend_on_all_parts():
    parts = ("image", b"{}", "auto", "scope", b"data")
    keys = {key_of(*parts)}
    for index in range(5):
        changed: list[str | bytes] = list(parts)
        changed[index] = changed[index][:-1]
        keys.add(key_of(*changed))  # type: ignore[arg-type]
    keys.add(key_of("image", b"{}", "autos", "cope", b"data"))
    assert len(keys) == 7
    assert all(len(key) == 16 for key in keys)
