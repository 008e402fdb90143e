"""Images of the Python classes: the ids are those of the same chats over HTTP."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from pipeline import LLM, AsyncLLM, SamplingParams
from pipeline.errors import PromptError
from tests.e2e.models.test_images import MAX_TOKENS, chat, choices, make_folder, png, rules, url
from tests.e2e.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("images")
    _, source = make_folder(folder)
    with Server(*rules(source)) as server:
        yield server


async def test_python_callers_get_the_same(server: Server) -> None:
    data = png(30)
    expected = choices(server, chat("Which?", data, add_generation_prompt=True))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for part in (
        {"type": "image_url", "image_url": {"url": url(data)}},
        {"type": "image_pil", "image_pil": Image.open(BytesIO(data))},
    ):
        messages = [{"role": "user", "content": [{"type": "text", "text": "Which?"}, part]}]
        async with AsyncLLM.attach(server.zmq) as llm:
            outputs = [one async for one in llm.chat(messages, params)]
        assert [one.token_ids for one in outputs[-1].outputs] == expected
    with LLM.attach(server.zmq) as blocking:
        (found,) = blocking.chat(messages, params)
    assert [one.token_ids for one in found.outputs] == expected


def test_texts_with_placeholders_get_the_images_of_multi_modal_data(server: Server) -> None:
    """As a chat with the same text."""
    text = "<s>User: Which<image>or<image></s>\nAssistant:"
    data = [png(31), png(32)]
    body = chat("Which", data[0], "or", data[1], add_generation_prompt=True)
    expected = choices(server, body)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM.attach(server.zmq) as llm:
        images = [Image.open(BytesIO(each)) for each in data]
        prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        (found,) = llm.generate(prompt, params)
        assert [one.token_ids for one in found.outputs] == expected
        with pytest.raises(PromptError, match="2 times <image>, which stands for an image; the number of images is 1"):
            llm.generate({"prompt": text, "multi_modal_data": {"image": images[0]}}, params)
