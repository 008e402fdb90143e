"""Images in the messages of Python callers become data: URLs."""

import base64
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from pipeline.client import protocol as p
from pipeline.client.client import ServerInfo
from pipeline.client.connection.wire import prompt_fields
from pipeline.client.inputs.chat import ChatOptions
from pipeline.client.inputs.prompts import chat_of, prompt_of
from pipeline.errors import PromptError

INFO = ServerInfo("m", 16, 64, 100, 1, 32, "s", 2000)
URL = "data:image/png;base64,YWJj"


def chat(part: Any) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]


def sent(part: Any) -> p.ContentPart:
    """The second part as `LLM.chat` sends it, which is the same as `AsyncClient` does."""
    content = chat_of(chat(part), "messages", ChatOptions(), INFO).prompt["messages"][0].content
    assert content == prompt_fields(chat(part))["messages"][0].content
    found = content[1]
    assert isinstance(found, p.ContentPart)
    return found


def test_urls_are_sent_unchanged() -> None:
    expected = p.ContentPart("image_url", image_url=p.ImageUrl(URL))
    assert sent({"type": "image_url", "image_url": URL}) == expected
    assert sent({"type": "image_url", "image_url": {"url": URL}}) == expected
    found = sent({"type": "image_url", "image_url": {"url": URL, "detail": "low"}})
    assert found.image_url == p.ImageUrl(URL, "low")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "F"])
def test_images_of_pillow_are_sent_as_png(mode: str) -> None:
    image = Image.new("RGB", (3, 2), (250, 0, 10)).convert(mode)
    found = sent({"type": "image_pil", "image_pil": image}).image_url
    assert isinstance(found, p.ImageUrl)
    head, data = found.url.split(",")
    assert head == "data:image/png;base64"
    again = Image.open(BytesIO(base64.b64decode(data)))
    assert again.format == "PNG" and again.size == (3, 2)
    assert again.convert("RGB").tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url"}, "must be a dict such as"),
        ({"type": "image_url", "image_url": {"url": 1}}, "must be a dict such as"),
        ({"type": "image_url", "image_url": {"url": URL, "x": 1}}, "must be a dict such as"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": 1}}, "['image_url']['detail'] must be a text"),
        ({"type": "image_pil", "image_pil": b"abc"}, "['image_pil'] must be an image of Pillow"),
        ({"type": "image_url", "image_url": URL + "A" * 2000}, "has 2026 bytes as a data: URL; this server accepts at"),
        ({"type": "audio_url"}, "content of type 'audio_url' is not supported, only text and images"),
    ],
)
def test_a_part_that_is_no_image_is_named(part: Any, words: str) -> None:
    with pytest.raises(PromptError) as error:
        chat_of(chat(part), "messages", ChatOptions(), INFO)
    assert str(error.value).startswith("messages[0]['content'][1]") and words in str(error.value)


def test_images_of_prompts_are_refused_by_name() -> None:
    with pytest.raises(PromptError, match="'multi_modal_data'\\] is not supported: give images to chat"):
        prompt_of({"prompt": "a", "multi_modal_data": {"image": object()}}, "prompt", INFO)
