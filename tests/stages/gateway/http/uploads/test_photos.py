"""Photos of cameras in bodies: they may be larger than what else a body has, for a model that takes images."""

import base64
import gzip
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import make_mocked_request

from pipeline.http_server.bodies import upload_budget
from pipeline.http_server.bodies.body_reader import KEPT_BODY, BodyReader
from pipeline.http_server.bodies.image_data import BASE64, PIECE_BYTES, base64_bytes, num_other_bytes
from pipeline.http_server.bodies.upload_budget import NUM_MEDIA_BODIES, SMALL_BYTES
from pipeline.http_server.errors import ApiError
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.received import PARSERS
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, MODEL, Gate
from tests.stages.gateway.http.uploads.test_uploads import expect_continue, is_refused

PHOTO = random.Random(5).randbytes(9_000_000)
TEXT = base64.b64encode(PHOTO).decode()
MAX_BODY, MAX_MEDIA = 2 * SMALL_BYTES, 8 * SMALL_BYTES
SMALL_PHOTO = base64.b64encode(PHOTO[: 3 * SMALL_BYTES]).decode()
"""Larger than MAX_BODY."""


@pytest.fixture
def _takes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedModel, "why_no_images", lambda *_: "")


@pytest.fixture
def gate(tmp_path: Path, _takes_images: None) -> Iterator[Gate]:
    with Gate(tmp_path, max_body_bytes=MAX_BODY, max_media_body_bytes=MAX_MEDIA) as gate:
        yield gate


def chat(data: str = SMALL_PHOTO, **fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    return CHAT | {"messages": [{"role": "user", "content": [part]}], **fields}


def messages(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    content = [{"type": "image", "source": source}]
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}


def responses(data: str) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": f"data:image/jpeg;base64,{data}"}
    return {"model": MODEL, "input": [{"role": "user", "content": [part]}]}


def ollama(data: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi", "images": [data]}]}


DIALECTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/api/chat": ollama,
    "/tokenize": lambda data: {"messages": chat(data)["messages"]},
}


def error_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    return response.status_code, error if isinstance(error, str) else error["message"]


@pytest.mark.usefixtures("_takes_images")
def test_every_api_takes_a_photo_of_9_mb_with_the_default_limits(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate:
        for path, body_of in DIALECTS.items():
            content = json.dumps(body_of(TEXT)).replace("/", "\\/").encode()  # as PHP writes it
            answer = gate.post(content, path)
            submit = gate.submit()
            assert [one.data for one in submit.images] == [PHOTO], path
            gate.reject(submit, m.Failure(418, "seen"))
            assert answer.result().status_code == 418, path


def test_a_model_of_texts_keeps_the_limit_of_texts(tmp_path: Path) -> None:
    with Gate(tmp_path, max_body_bytes=MAX_BODY, max_media_body_bytes=MAX_MEDIA) as gate:
        message = f"the body is larger than {MAX_BODY} bytes (gateway.max_body_bytes)"
        assert error_of(gate.client.post("/v1/chat/completions", json=chat())) == (413, message)


@pytest.mark.parametrize("body", [{"prompt": [1] * 90_000}, {"prompt": ["a, b " * 90_000]}, chat(stop=[" "] * 50_000)])
def test_what_is_beside_images_is_refused_before_it_is_decoded(
    gate: Gate, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for handler in ("chat_completions", "completions"):
        monkeypatch.setitem(PARSERS, handler, lambda *_: pytest.fail("it was decoded"))
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    status, message = error_of(gate.client.post(path, json=body))
    assert status == 413 and f"the limit is {MAX_BODY} (gateway.max_body_bytes)" in message


def test_other_texts_than_images_count_however_they_are_spelled(gate: Gate) -> None:
    """Letters alone look like base64 until the body is decoded."""
    for body in (CHAT | {"user": SMALL_PHOTO}, chat(user="a" * MAX_BODY)):
        status, message = error_of(gate.client.post("/v1/chat/completions", json=body))
        assert status == 413 and "that are not base64 of images, and the limit is 131072" in message
    answer = gate.post(chat(user="a" * (MAX_BODY - 2000)))
    assert gate.serve().images[0].data == PHOTO[: 3 * SMALL_BYTES]
    assert answer.result().status_code == 200


@pytest.mark.parametrize("is_declared", [True, False])
def test_photos_have_a_limit_of_their_own(gate: Gate, is_declared: bool) -> None:
    for data, status in ((SMALL_PHOTO, 200), (SMALL_PHOTO * 2 + "AAAA", 413)):
        content = json.dumps(chat(data)).encode()
        sent: Any = content if is_declared else iter([content[:MAX_BODY], content[MAX_BODY:]])
        answer = gate.do(gate.client.post, "/v1/chat/completions", content=sent)
        if status == 200:
            assert len(gate.serve().images) == 1
        else:
            message = f"the body is larger than {MAX_MEDIA} bytes (gateway.max_media_body_bytes)"
            assert error_of(answer.result()) == (413, message)
        assert answer.result().status_code == status


def test_compressed_bodies_have_the_limit_of_texts(gate: Gate) -> None:
    content = gzip.compress(json.dumps(chat()).encode())
    headers = {"Content-Encoding": "gzip"}
    response = gate.client.post("/v1/chat/completions", content=content, headers=headers)
    assert error_of(response) == (413, f"the body is larger than {MAX_BODY} bytes (gateway.max_body_bytes)")


@pytest.mark.parametrize("is_declared", [True, False])
def test_photos_that_arrive_leave_the_room_of_texts_alone(
    gate: Gate, is_declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_budget, "GRACE_S", PATIENCE_S)  # no body is slow
    part = b"a" * (MAX_MEDIA - 100)
    with ExitStack() as stack:
        for _ in range(NUM_MEDIA_BODIES):
            if is_declared:
                connection = stack.enter_context(expect_continue(gate, MAX_MEDIA, "/v1/chat/completions"))
                connection.sendall(part)
            else:
                connection = stack.enter_context(gate.raw_head("Transfer-Encoding: chunked"))
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        photo = json.dumps(chat()).encode()
        gate.rig.until(lambda _: is_refused(gate.client.post("/v1/chat/completions", content=photo)))
        text = json.dumps(CHAT).encode().ljust(MAX_BODY)
        answer = gate.post(text)
        gate.serve()
        assert answer.result().status_code == 200


async def test_a_model_of_several_checks_the_body_that_was_read_to_choose_it() -> None:
    reader, request = BodyReader(MAX_BODY, 10, MAX_MEDIA), make_mocked_request("POST", "/")
    for takes_images in (True, False):
        request[KEPT_BODY] = body = b"a" * (MAX_BODY + 1)
        if takes_images:
            assert await reader.parse(request, bytes, takes_images=True) == body
            continue
        with pytest.raises(ApiError, match=r"larger than 131072 bytes \(gateway.max_body_bytes\)"):
            await reader.parse(request, bytes)


def test_the_scan_counts_whole_pieces_and_takes_every_character_of_base64() -> None:
    assert num_other_bytes(BASE64 * 1000) == num_other_bytes(b"") == 0
    assert num_other_bytes(b'"' + b"A" * 3 * PIECE_BYTES + b'"') == PIECE_BYTES + 2
    assert num_other_bytes(b"a " * 5000) == 10_000
    for num_bytes in range(8):
        assert base64_bytes(num_bytes) == len(base64.b64encode(bytes(num_bytes)))
