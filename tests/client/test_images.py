"""Images in the messages of Python callers become data: URLs."""

import base64
import os
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


def test_images_of_a_text_prompt_are_those_of_vllm_s_multi_modal_data() -> None:
    images = [Image.new("RGB", (3, 2), color) for color in ("red", "blue")]
    for given, num in ((images[0], 1), (images, 2), ([], 0)):
        found = prompt_of({"prompt": "a", "multi_modal_data": {"image": given}}, "prompt", INFO)
        urls = [sent({"type": "image_pil", "image_pil": image}).image_url for image in images[:num]]
        assert found.text == "a" and found.prompt == {"prompt": "a", **({"images": urls} if num else {})}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"multi_modal_data": {"image": b"abc"}}, "['image'] must be an image of Pillow, or a list of them: number 0"),
        (
            {"multi_modal_data": {"audio": b"abc"}},
            ' must be a dict such as {"image": …}: a model takes texts and images',
        ),
        ({"multi_modal_data": [b"abc"]}, ' must be a dict such as {"image": …}: a model takes texts and images'),
        (
            {"prompt_token_ids": [1], "multi_modal_data": {}},
            " needs a text as prompt, with a placeholder for each image",
        ),
    ],
)
def test_data_of_a_prompt_that_is_no_image_is_named(prompt: dict[str, Any], words: str) -> None:
    with pytest.raises(PromptError) as error:
        prompt_of({"prompt": "a"} | prompt, "prompts[3]", INFO)
    assert str(error.value).startswith(f"prompts[3]['multi_modal_data']{words}")


def test_images_of_a_prompt_that_are_too_large_are_named() -> None:
    noise = Image.frombytes("L", (40, 40), os.urandom(1600))
    with pytest.raises(
        PromptError, match=r"prompt\['multi_modal_data'\] has \d+ bytes as a data: URL; this server accepts"
    ):
        prompt_of({"prompt": "a", "multi_modal_data": {"image": noise}}, "prompt", INFO)
