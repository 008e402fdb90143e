"""langchain-openai: images in messages and in the result of a tool, by Chat Completions and by Responses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

GIVEN: dict[str, Any] = json.loads(Path(os.environ["PIPELINE_GIVEN"]).read_text(encoding="utf-8"))
"""The base64 of two images, and the reply to them."""


def of_openai(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def of_langchain(data: str) -> dict[str, Any]:
    return {"type": "image", "base64": data, "mime_type": "image/png"}


@pytest.mark.parametrize("use_responses_api", [False, True])
@pytest.mark.parametrize("image", [of_openai, of_langchain])
def test_messages_have_images(url: str, model: str, use_responses_api: bool, image: Any) -> None:
    chat = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=12,
        use_responses_api=use_responses_api,
    )
    one, two = GIVEN["images"]
    messages = [
        HumanMessage("Look"),
        AIMessage("I look.", tool_calls=[{"id": "call_1", "name": "look", "args": {}}]),
        ToolMessage([{"type": "text", "text": "seen"}, image(one)], tool_call_id="call_1"),
        HumanMessage([image(two), {"type": "text", "text": "Is it this?"}]),
    ]
    reply = chat.invoke(messages)
    assert reply.text == GIVEN["text"]
    assert reply.usage_metadata is not None and reply.usage_metadata["input_tokens"] == GIVEN["num_tokens"]
    total, *chunks = chat.stream(messages)
    for chunk in chunks:
        total += chunk
    assert total.text == reply.text
