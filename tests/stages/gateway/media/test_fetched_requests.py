"""Requests whose images are URLs: ingest gets the bytes, and a recording has them."""

import asyncio
import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.media.fetcher import MediaFetcher
from pipeline.stages.gateway.parsing.chat.images import LinkedImage
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.replays import replays_alike

DATA = "data:image/png;base64,YWJj"


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that were fetched; the model takes images."""
    urls: list[str] = []

    async def fetch(self: MediaFetcher, images: Sequence[LinkedImage], scope: str, left_s: float) -> list[bytes]:
        urls.extend(str(one.url) for one in images)
        return [str(one.url).encode() for one in images]

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    monkeypatch.setattr(ServedModel, "why_no_images", lambda *_: "")
    return urls


def chat(*urls: str, **others: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return CHAT | {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Hi"}]}], **others}


def test_an_image_of_a_url_is_fetched(tmp_path: Path, fetched: list[str]) -> None:
    with Gate(tmp_path, allowed_media_domains=("Images.Example", "*.cdn.example")) as gate:
        answer = gate.post(chat("https://images.example/a", DATA, "https://b.cdn.example/b"))
        submit = gate.submit()
        data = [b"https://images.example/a", b"abc", b"https://b.cdn.example/b"]
        assert [(one.data, one.detail) for one in submit.images] == [(one, "low") for one in data]
        assert all(type(one) is m.EncodedImage for one in submit.images)
        gate.reject(submit, m.Failure(418, "seen"))
        assert answer.result().status_code == 418
        refused = gate.client.post("/v1/chat/completions", json=chat("https://other.example/a")).json()["error"]
        assert refused["param"] == "messages[0].content[0].image_url.url"
        assert "not in gateway.allowed_media_domains" in refused["message"]
        assert fetched == ["https://images.example/a", "https://b.cdn.example/b"]


def test_what_waits_for_its_images_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests are fetched at a time: without a bound, those behind them filled the memory with their bodies."""
    begun, go_on = threading.Event(), threading.Event()

    async def fetch(self: MediaFetcher, images: Sequence[LinkedImage], scope: str, left_s: float) -> list[bytes]:
        begun.set()
        await asyncio.to_thread(go_on.wait)
        return [b"abc"] * len(images)

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    body = chat("https://images.example/a", user="a" * 600_000)
    with Gate(tmp_path, allowed_media_domains=("images.example",), max_open_bytes=2 * 1024**2) as gate:
        waiting = gate.post(body)
        begun.wait()
        refused = gate.client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503 and "wait for images that are fetched" in refused.json()["error"]["message"]
        go_on.set()
        gate.serve("Hello")
        assert waiting.result().status_code == 200
        again = gate.post(body)
        gate.serve("Hello")
        assert again.result().status_code == 200


@pytest.mark.parametrize("of_server", [True, False])
def test_a_request_whose_time_passes_while_its_images_are_fetched_gets_504(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_server: bool
) -> None:
    """It got 503, as if the server were overloaded, and a `timeout_s` of its own did not end the wait."""

    async def never(*_: Any) -> list[bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.undo()
    monkeypatch.setattr(MediaFetcher, "_fetch_all", never)
    monkeypatch.setattr(ServedModel, "why_no_images", lambda *_: "")
    settings: dict[str, Any] = {"request_timeout_s": 0.3} if of_server else {}
    body = chat("https://images.example/a", **({} if of_server else {"timeout_s": 0.3}))
    with Gate(tmp_path, allowed_media_domains=("images.example",), **settings) as gate:
        late = gate.client.post("/v1/chat/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert "timed out after 0.3 s" in late.json()["error"]["message"]


def test_without_allowed_domains_none_is_fetched(tmp_path: Path, fetched: list[str]) -> None:
    with Gate(tmp_path) as gate:
        refused = gate.client.post("/v1/chat/completions", json=chat("https://images.example/a")).json()["error"]
        assert "this server fetches none: send a data: URL" in refused["message"]
    assert not fetched


def test_a_replay_has_the_bytes_and_fetches_nothing(tmp_path: Path, fetched: list[str]) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording, allowed_media_domains=("images.example",)) as gate:
        stream = gate.post(chat("https://images.example/a", stream=True), "/v1/chat/completions")
        gate.serve("Hello")
        assert "Hello" in stream.result().text
    num_fetched = len(fetched)
    assert replays_alike("gateway", recording).are_same and num_fetched == len(fetched) == 1


def test_a_stream_whose_image_is_fetched_has_no_resume_points(tmp_path: Path) -> None:
    with Gate(tmp_path, allowed_media_domains=("images.example",)) as gate:
        for url, has_points in (("https://images.example/a", False), (DATA, True)):
            headers = {"X-Pipeline-Resumable": "1"}
            stream = gate.do(gate.client.post, "/v1/chat/completions", json=chat(url, stream=True), headers=headers)
            gate.serve("Hello")
            assert (": point {" in stream.result().text) == has_points


@pytest.mark.parametrize("is_rejected", [True, False])
def test_the_bytes_of_images_go_with_their_request(tmp_path: Path, is_rejected: bool) -> None:
    """They stayed until a garbage collection, which small requests bring about once in a thousand: 41 images of
    hostile clients were 60 MiB."""
    with Gate(tmp_path) as gate:
        gc.collect()
        gc.disable()
        try:
            answer = gate.post(chat(DATA))
            if is_rejected:
                gate.reject(gate.submit(), m.Failure(400, "it can't be decoded", "messages", "invalid_image"))
            else:
                gate.serve("Hello")
            assert answer.result().status_code == (400 if is_rejected else 200)
            gate.rig.until(lambda _: not images_in_memory())
        finally:
            gc.enable()


def images_in_memory() -> list[m.EncodedImage]:
    """Those that something refers to which the garbage collector knows."""
    found = (one for known in gc.get_objects() for one in gc.get_referents(known))
    return [one for one in found if type(one) is m.EncodedImage]
