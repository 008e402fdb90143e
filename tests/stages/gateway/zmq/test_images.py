"""Images of text prompts over ZeroMQ; those of chats are parsed as over HTTP."""

from typing import Any

import pytest

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin.served_model import ServedModel
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer

IMAGE = p.ImageUrl("data:image/png;base64,YWJj", "low")


@pytest.fixture(autouse=True)
def _takes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedModel, "why_no_images", lambda *_: "")


def test_images_of_a_text_reach_ingest(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, "<image>", images=[IMAGE, p.ImageUrl("data:;base64,YWI=")])
        submit = gate.submit()
        assert submit.prompt == m.TextPrompt("<image>")
        assert submit.images == [
            m.EncodedImage(b"abc", "images[0].url", "low"),
            m.EncodedImage(b"ab", "images[1].url", ""),
        ]
        gate.reject(submit, m.Failure(400, "seen", "images[0].url"))
        assert peer.receive(p.Failed).failure.message == "seen"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [p.MessageParam("user", "x")]}, "images", "'images' needs 'prompt', a text with a placeholder"),
        ({"prompt_token_ids": b"\1\0\0\0"}, "images", "'images' needs 'prompt', a text with a placeholder"),
        ({"prompt": "x", "task": "embed"}, "images", "'images' is not allowed with 'task' or 'pooling'"),
        ({"prompt": "x", "images": [p.ImageUrl("abc")]}, "images[0].url", "'images[0].url' must be a data: URL"),
        (
            {"prompt": "x", "images": [p.ImageUrl("https://images.example/a")]},
            "images[0].url",
            "'images[0].url' is an https: URL, and none are fetched over ZeroMQ: send a data: URL",
        ),
        (
            {"prompt": "x", "images": [p.ImageUrl(IMAGE.url, "x")]},
            "images[0].detail",
            "'images[0].detail' must be one of",
        ),
        ({"prompt": "x", "images": [IMAGE] * 101}, "images[100]", "a request can have 100 (limits.max_images)"),
    ],
)
def test_a_wrong_image_is_named(gate: Gate, fields: dict[str, Any], param: str, words: str) -> None:
    with RawPeer(gate) as peer:
        peer.send(p.Generate(1, p.Request(**({"images": [IMAGE]} | fields)), 100))
        failure = peer.receive(p.Failed).failure
        assert (failure.status, failure.param) == (400, param)
        assert words in failure.message
        assert peer.is_still_served()
