"""A client's streams through the relay."""

import json
from typing import Any

import aiohttp

BODY = {"prompt": "Hi", "stream": True}


async def stream(client: aiohttp.ClientSession, body: Any = BODY, path: str = "/v1/completions") -> str:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.text()


def tokens_of(text: str) -> list[int]:
    assert text.endswith("data: [DONE]\n\n") and ": point" not in text
    return [json.loads(event.removeprefix("data: "))["i"] for event in text.split("\n\n")[:-2]]


class Once:
    """Does something at a token, the first time."""

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at, self.is_done = what, at, False

    def __call__(self, i: int) -> str:
        if i == self.at and not self.is_done:
            self.is_done = True
            return self.what
        return ""
