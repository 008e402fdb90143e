"""Requests with images that wait leave room for those of texts, and for those of other keys."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin.served_model import ServedModel
from tests.stages.gateway.gate import CHAT, Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.http.uploads.test_uploads import CONTINUE, expect_continue
from tests.stages.gateway.test_scopes import bearer, post

NUM_BYTES = 100_000
MAX_MEDIA = 2**20


@pytest.fixture(autouse=True)
def _takes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedModel, "why_no_images", lambda *_: "")


def photo(num_bytes: int = NUM_BYTES, **fields: Any) -> dict[str, Any]:
    url = f"data:image/jpeg;base64,{base64.b64encode(bytes(num_bytes)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return CHAT | {"messages": [{"role": "user", "content": content}], **fields}


def wait(gate: Gate, num: int, body: Callable[[], dict[str, Any]] = photo, num_ids: int = 3) -> list[m.Submit]:
    """Open so many requests, which ingest accepts."""
    submits = []
    for _ in range(num):
        gate.post(body())
        submits.append(gate.submit())
        gate.accept(submits[-1], num_ids)
    gate.rig.load()
    return submits


def refusal(gate: Gate, body: dict[str, Any]) -> str:
    response = gate.client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "overloaded") and int(response.headers["Retry-After"]) >= 1
    return str(error["message"])


def open_media(gate: Gate, key: str = "") -> int:
    gate.rig.load()
    return int(gate.client.get("/load", headers=bearer(key) if key else {}).json()["open_media_bytes"])


def end(gate: Gate, *submits: m.Submit) -> None:
    for submit in submits:
        gate.finish(submit)
    gate.rig.until(lambda load: load.num_open_requests == 0)


def test_texts_are_admitted_beside_images_that_wait(tmp_path: Path) -> None:
    """As in the default settings 69 photos of cameras took all that open requests may keep."""
    with Gate(tmp_path, max_open_bytes=2**20) as gate:
        photos = wait(gate, 6)
        answer = gate.post(CHAT | {"user": "x" * 10_000})
        text = gate.begin()
        gate.finish(text)
        assert answer.result().status_code == 200
        end(gate, *photos)


def test_images_that_wait_have_a_limit_by_name(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_media_bytes=MAX_MEDIA) as gate:
        photos = wait(gate, 9)
        assert 9 * NUM_BYTES < open_media(gate) < 9 * (NUM_BYTES + 1000)
        message = refusal(gate, photo())
        assert "bytes are free for requests with images" in message and "gateway.max_open_media_bytes" in message
        (text,) = wait(gate, 1, lambda: CHAT)
        gate.finish(photos[0])
        gate.rig.until(lambda load: load.num_open_requests == 9)
        again = wait(gate, 1)
        end(gate, text, *photos[1:], *again)
        assert open_media(gate) == 0
        (large,) = wait(gate, 1, lambda: photo(2 * MAX_MEDIA))
        assert open_media(gate) > 2 * MAX_MEDIA, "a request alone is admitted"
        end(gate, large)


def test_half_of_the_sequences_is_for_texts(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_sequences=4) as gate:
        (both,) = wait(gate, 1, lambda: photo(n=2))
        message = refusal(gate, photo())
        assert "0 of 2 sequences are free for requests with images" in message
        assert "half of gateway.max_open_sequences" in message
        texts = wait(gate, 2, lambda: CHAT)
        gate.finish(both, index=1)
        end(gate, both, *texts)


def test_half_of_the_prompt_tokens_is_for_texts(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_tokens=2000) as gate:
        photos = wait(gate, 2, num_ids=450)
        assert "100 of 1000 prompt tokens are free for requests with images" in refusal(gate, photo())
        texts = wait(gate, 2, lambda: CHAT, num_ids=500)
        end(gate, *photos, *texts)


def test_a_key_leaves_images_of_others_an_eighth(tmp_path: Path) -> None:
    with locked(tmp_path, max_open_media_bytes=2 * MAX_MEDIA) as gate:
        submits = []
        for key, body in (*[(KEY, photo())] * 17, (SECOND, photo()), (KEY, CHAT)):
            if key == SECOND:
                refused = post(gate, KEY, photo()).result()
                assert refused.status_code == 503
                assert "bytes of images of this API key are open" in refused.text
            post(gate, key, body)
            submits.append(gate.begin())
            gate.rig.load()
        end(gate, *submits)


def test_a_full_gateway_refuses_a_photo_before_its_body(tmp_path: Path) -> None:
    with Gate(tmp_path, max_body_bytes=2**16, max_open_media_bytes=MAX_MEDIA) as gate:
        photos = wait(gate, 9)
        for num_bytes, begin in ((2**16 + NUM_BYTES, b"HTTP/1.1 503 "), (2**16, CONTINUE)):
            with expect_continue(gate, num_bytes, "/v1/chat/completions") as connection:
                assert read_until(connection, b"}}" if num_bytes > 2**16 else b"\r\n\r\n").startswith(begin)
        end(gate, *photos)


def test_images_of_a_reply_that_is_not_read_are_given_back(tmp_path: Path) -> None:
    with Gate(tmp_path, send_buffer_bytes=4096) as gate, gate.raw(photo()) as _:
        submit = gate.begin()
        assert open_media(gate) > NUM_BYTES
        gate.delta(submit, "x" * 4_000_000)
        gate.finish(submit)
        gate.rig.until(lambda _: not open_media(gate))
        assert gate.rig.load().num_open_requests == 1
