"""Ingest's side: images are decoded in a process, shared, cached, and refused with the name of their field."""

import asyncio
import errno
import functools
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from pipeline.media import config as media
from pipeline.media import images, processors
from pipeline.media.limits import ImageLimits
from pipeline.runtime.workers import job_dispatcher
from pipeline.stages.ingest.media import image_decoder
from pipeline.stages.ingest.media.image_decoder import LARGE_BYTES as LARGE
from pipeline.stages.ingest.media.image_decoder import ImageDecoder
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from tests.media.model_files import IDEFICS3

PATIENCE_S = 60.0
PARAM = "messages[0].content[1]"


def png(width: int, height: int, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    media.save(IDEFICS3.read(tmp_path / "model"), tmp_path)
    return tmp_path


@pytest.fixture
async def decoder(folder: Path) -> AsyncIterator[ImageDecoder]:
    made = ImageDecoder(folder, limits=ImageLimits(max_pixels=1_000_000), cache_bytes=2**20)
    async with asyncio.timeout(PATIENCE_S):
        yield made
    made.close()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def pid_of(decoder: ImageDecoder) -> int:
    assert decoder._dispatcher._worker is not None
    return decoder._dispatcher._worker.pid


async def rejected(decoder: ImageDecoder, data: bytes) -> str:
    with pytest.raises(RequestRejected) as caught:
        await decoder.decode(data, PARAM)
    failure = caught.value.failure
    assert (failure.status, failure.param) == (400, PARAM)
    return failure.message


async def test_the_image_is_that_of_the_processor(decoder: ImageDecoder, folder: Path):
    data = png(300, 200)
    found = await decoder.decode(data, PARAM)
    config = media.load(folder)
    assert config is not None
    expected = processors.process(images.decode(data), config)
    assert np.array_equal(found.pixels, expected.pixels)
    assert (found.grid, found.text, found.run_lengths) == (expected.grid, expected.text, expected.run_lengths)
    assert not found.pixels.flags.writeable


@pytest.mark.parametrize(("size", "is_loop"), [(LARGE - 1, True), (LARGE, False)])
async def test_the_loop_neither_hashes_nor_copies_a_large_image(
    size: int, is_loop: bool, decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
):
    threads: list[threading.Thread] = []

    def spied(call: Callable[..., Any], *args: Any) -> Any:
        threads.append(threading.current_thread())
        return call(*args)

    for name in ("key_of", "_write_all"):
        monkeypatch.setattr(image_decoder, name, functools.partial(spied, getattr(image_decoder, name)))
    data = png(20, 20)
    found = await decoder.decode(data + bytes(size - len(data)), PARAM)
    assert found.pixels.shape == (await decoder.decode(data, PARAM)).pixels.shape
    assert [one is threading.main_thread() for one in threads[:2]] == [is_loop] * 2


async def test_a_cancelled_copy_closes_its_file(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch):
    await decoder.decode(png(9, 9), PARAM)  # starts the process
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    copy = image_decoder._write_all

    def slow(fd: int, data: bytes) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        copy(fd, data)  # raises OSError if it was closed
        ended.set()

    monkeypatch.setattr(image_decoder, "_write_all", slow)
    before = num_descriptors()
    task = asyncio.create_task(decoder.decode(png(20, 20) + bytes(LARGE), PARAM))
    while not begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set() and num_descriptors() == before
    monkeypatch.undo()
    await decoder.decode(png(20, 20) + bytes(LARGE), PARAM)


async def test_slow_images_of_one_key_leave_a_place_to_others(decoder: ImageDecoder):
    gate = decoder._dispatcher._gate
    slow = [asyncio.create_task(gate.enter("one", 1)) for _ in range(2 * image_decoder.NUM_WORKERS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S / 4):
        assert len((await decoder.decode(png(40, 40), PARAM, scope="other")).pixels)
    for task in slow:
        task.cancel()
    assert gate.num_inside == image_decoder.NUM_WORKERS - 1


async def test_an_image_is_decoded_once_for_a_scope(decoder: ImageDecoder):
    data = png(20, 20)
    first, second = await asyncio.gather(decoder.decode(data, PARAM), decoder.decode(data, PARAM))
    third = await decoder.decode(data, PARAM)
    assert first is second is third
    assert decoder._dispatcher.num_jobs == 1
    other = await decoder.decode(data, PARAM, scope="another")
    detailed = await decoder.decode(data, PARAM, detail="low")
    assert len({first.key, other.key, detailed.key}) == 3
    assert decoder._dispatcher.num_jobs == 3


async def test_the_cache_has_a_bound(decoder: ImageDecoder):
    size = (await decoder.decode(png(64, 64), PARAM)).num_bytes
    for seed in range(1, 2 * 2**20 // size):
        await decoder.decode(png(64, 64, seed), PARAM)
    assert 2**20 - size < decoder._cache.num_bytes <= 2**20
    assert decoder._cache.num_bytes == sum(each.num_bytes for each in decoder._cache._items.values())


async def test_a_dropped_image_stays_readable(folder: Path):
    decoder = ImageDecoder(folder, cache_bytes=0)
    try:
        found = await decoder.decode(png(64, 64), PARAM)
        assert len(decoder._cache) == 0
        before = found.pixels.copy()
        await decoder.decode(png(64, 64, seed=1), PARAM)
        assert np.array_equal(found.pixels, before)
    finally:
        decoder.close()


async def test_errors_name_the_field(decoder: ImageDecoder):
    assert await rejected(decoder, b"<svg/>") == (
        f"the image '{PARAM}' is in no format that is read here: send JPEG, PNG, WebP, GIF or BMP"
    )
    assert "has 2000×1000 pixels; the limit is 1000000" in await rejected(decoder, png(2000, 1000))
    assert "damaged or incomplete" in await rejected(decoder, png(100, 100)[:-100])
    assert "has 33554433 bytes; the limit is 33554432" in await rejected(decoder, bytes(2**25 + 1))
    assert (await decoder.decode(png(9, 9), PARAM)).pixels.shape == (17, 3, 64, 64)


async def test_a_killed_process_is_replaced(decoder: ImageDecoder):
    await decoder.decode(png(9, 9), PARAM)
    before = pid_of(decoder)
    os.kill(before, signal.SIGKILL)
    await decoder.decode(png(9, 9, seed=1), PARAM)
    assert pid_of(decoder) != before


async def test_a_process_that_dies_with_an_image_is_replaced(decoder: ImageDecoder):
    await decoder.decode(png(9, 9), PARAM)
    before = pid_of(decoder)
    psutil.Process(before).suspend()
    waiting = asyncio.create_task(decoder.decode(png(9, 9, seed=1), PARAM))
    while not decoder._dispatcher._answers:
        await asyncio.sleep(0)
    os.kill(before, signal.SIGKILL)
    assert (await waiting).pixels.size
    assert pid_of(decoder) != before


async def test_an_image_that_is_cancelled_while_the_process_starts_stops_no_other(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
):
    connecting = asyncio.Event()

    async def connect(**_: Any) -> Any:
        connecting.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "open_unix_connection", connect)
        first = asyncio.create_task(decoder.decode(png(9, 9), PARAM))
        await connecting.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    async with asyncio.timeout(image_decoder.WAIT_S / 2):
        await decoder.decode(png(9, 9), PARAM)


async def test_a_process_that_does_not_answer_is_replaced(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch):
    await decoder.decode(png(9, 9), PARAM)
    before = pid_of(decoder)
    psutil.Process(before).suspend()
    with monkeypatch.context() as patched:
        patched.setattr(decoder._dispatcher, "_wait_s", 0.2)
        with pytest.raises(RequestRejected, match="could not be decoded in time"):
            await decoder.decode(png(9, 9, seed=1), PARAM)
    await decoder.decode(png(9, 9, seed=1), PARAM)
    assert pid_of(decoder) != before


@pytest.mark.parametrize(("owner", "name"), [(os, "memfd_create"), (job_dispatcher, "Worker")])
async def test_an_image_for_which_there_is_no_descriptor_is_refused(
    owner: object, name: str, decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    before = num_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        with pytest.raises(RequestRejected, match="could not be decoded in time"):
            await decoder.decode(png(9, 9), PARAM)
    assert decoder._dispatcher._gate.num_inside == 0
    decoder._dispatcher._stop()
    await asyncio.sleep(0)  # the streams' own end
    assert num_descriptors() == before
    await decoder.decode(png(9, 9), PARAM)


async def test_a_cancelled_image_keeps_its_turn_until_it_is_decoded(decoder: ImageDecoder):
    await decoder.decode(png(9, 9), PARAM)
    process = psutil.Process(pid_of(decoder))
    process.suspend()
    waiting = asyncio.create_task(decoder.decode(png(9, 9, seed=1), PARAM))
    while not decoder._dispatcher._answers:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert decoder._dispatcher._gate.num_inside == 1
    process.resume()
    while decoder._dispatcher._gate.num_inside:
        await asyncio.sleep(0.001)
    assert not decoder._dispatcher._answers


async def test_each_key_has_its_share(folder: Path):
    """One with many images does not keep another from decoding its own."""
    decoder = ImageDecoder(folder, num_workers=1)
    try:
        order: list[str] = []

        async def decode(scope: str, seed: int) -> None:
            await decoder.decode(png(40, 40, seed), PARAM, scope=scope)
            order.append(scope)

        await asyncio.gather(*(decode("many", seed) for seed in range(20)), decode("one", 0))
        assert order.index("one") <= 2
    finally:
        decoder.close()


async def test_nothing_is_left_open(folder: Path):
    own = psutil.Process()
    before = own.num_fds()
    decoder = ImageDecoder(folder, cache_bytes=0)
    for seed in range(5):
        await decoder.decode(png(9, 9, seed), PARAM)
    await rejected(decoder, b"x")
    pid = pid_of(decoder)
    decoder.close()
    await asyncio.sleep(0)  # the streams' own end
    assert own.num_fds() <= before + 1
    assert not psutil.pid_exists(pid)
    with pytest.raises(RequestRejected, match="could not be decoded in time"):
        await decoder.decode(png(9, 9, seed=9), PARAM)
