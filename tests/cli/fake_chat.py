"""A fake server of the OpenAI API with scripted answers, in a thread of its own."""

import asyncio
import threading
from typing import Any

import orjson
from aiohttp import web

PATIENCE_S = 30.0


class FakeChat:
    """Answers `N: text` to the N-th message of a conversation, word by word. Some texts trigger other behavior; see
    `_answer`. Use as a context manager."""

    def __init__(self, port: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = threading.Event()
        """Set when a client disconnects before the end of its answer."""
        self.has_usage = True
        self.recommended: dict[str, float] | None = None
        """The model's recommendations in /v1/models, if it lists them."""
        self.url = ""
        self._port = port
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "FakeChat":
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        card: dict[str, Any] = {"id": "fake-model"}
        if self.recommended is not None:
            card["default_sampling_params"] = self.recommended
        return web.json_response({"data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = body["messages"][-1]["content"]
        match text:
            case "too long":
                error = {"message": "this model's maximum context length is 9", "code": "context_length_exceeded"}
                return web.json_response({"error": error}, status=400)
            case "plain":
                return web.json_response({"choices": [{"message": {"content": "x"}}]})
            case "html":
                return web.Response(text="<h1>Bad gateway</h1>", status=502)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        finish = "stop"
        match text:
            case "for ever":
                while True:
                    await self._event(response, "on ")
                    await asyncio.sleep(0.01)
            case "break off":
                await self._event(response, "half an ")
                assert request.transport is not None
                request.transport.close()
                return response
            case "go wrong":
                await self._event(response, "half an ")
                await response.write(b'data: {"error": {"message": "a stage died"}}\n\n')
                return response
            case "control":
                await self._event(response, "\x1b[2Jbell\x07 and\ttab")
            case "cut":
                await self._event(response, "as far as it goes")
                finish = "length"
            case "garbage":
                await response.write(b"data: {not json\n\n")
                return response
            case _:
                for word in f"{len(body['messages'])}: {text}".split(" "):
                    await self._event(response, f"{word} ")
        await response.write(
            b"data: " + orjson.dumps({"choices": [{"delta": {}, "finish_reason": finish}], "usage": None}) + b"\r\n\r\n"
        )
        if self.has_usage:
            await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, text: str) -> None:
        event = {"choices": [{"delta": {"content": text}, "finish_reason": None}]}
        await response.write(b": comment\n\ndata: " + orjson.dumps(event) + b"\n\n")
