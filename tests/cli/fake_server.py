"""A fake server of the OpenAI API that counts words, in a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from tests.http_server.accepted import all_accepted

PATIENCE_S = 30.0
TEMPLATE_TOKENS = 20


class FakeServer:
    """Answers every prompt with `max_tokens` words. Use as a context manager.

    `fails` maps each request's body and number (counted from 0) to its failure: None,
    "refuse" (503), "bad" (400), "drop" (the connection ends without an answer), "cut" (ends after a word) or "error"
    (an error event).

    With an `api_key`, other requests than those to /health need it.

    `num_unhealthy` requests to /health get 503 before the first 200.
    """

    def __init__(
        self,
        fails: Callable[[dict[str, Any], int], str | None] = lambda body, number: None,
        port: int = 0,
        num_unhealthy: int = 0,
        api_key: str = "",
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.max_open = 0
        self.url = ""
        self.has_usage = True
        self.models: Any = {"object": "list", "data": [{"id": "fake", "object": "model"}]}
        self.usage: Any = None
        """The usage that whole answers report instead of the real counts."""
        self.num_unhealthy = num_unhealthy
        self._fails = fails
        self._api_key = api_key
        self._port = port
        self._open = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._counted(self._chat))
        app.router.add_post("/v1/completions", self._counted(self._completions))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await all_accepted()
        await runner.cleanup()

    def _counted(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._open += 1
            self.max_open = max(self.max_open, self._open)
            try:
                return await answer(request)
            finally:
                self._open -= 1

        return handle

    async def _health(self, request: web.Request) -> web.Response:
        self.num_unhealthy -= 1
        return web.Response(status=503 if self.num_unhealthy >= 0 else 200)

    async def _models(self, request: web.Request) -> web.Response:
        if self._api_key and request.headers.get("authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": {"message": "Invalid API key"}}, status=401)
        return web.json_response(self.models)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(
            request, body, body["messages"][0]["content"], lambda text: {"delta": {"content": text}}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], lambda text: {"text": text})

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str, choice: Callable[[str], dict[str, Any]]
    ) -> web.StreamResponse:
        fault = self._fails(body, len(self.bodies))
        self.bodies.append(body)
        if fault == "drop":
            assert request.transport is not None
            request.transport.close()
        if fault == "refuse":
            return web.json_response({"error": {"message": "busy", "type": "overloaded"}}, status=503)
        if fault == "bad":
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        num_prompt = TEMPLATE_TOKENS + len(prompt.split())
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            return web.json_response({"choices": [choice("word")], "usage": self.usage or usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(1 if fault == "cut" else body["max_tokens"]):
            await self._event(response, {"choices": [choice("word ") | {"finish_reason": None}]})
            await asyncio.sleep(0.001)  # a step
        if fault == "error":
            await self._event(response, {"error": {"message": "a stage died"}})
        elif fault != "cut":
            await self._event(response, {"choices": [choice("") | {"finish_reason": "length"}]})
            if self.has_usage:
                await self._event(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
