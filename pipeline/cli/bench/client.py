"""Requests over HTTP to a server with the OpenAI API."""

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import orjson

from pipeline.cli.bench.tally import Tally, error_text
from pipeline.cli.no_server import no_server

UNAUTHORIZED = 401
KEY_ADVICE = "give the server's API key with --api-key, or set PIPELINE_API_KEY"
REFUSALS = (400, 401, 403, 404, 405, 413, 422)
MAX_SHOWN_BYTES = 300


class RequestResult(msgspec.Struct):
    """The measurements of one request. Times are in seconds of `perf_counter`."""

    sent_s: float
    ended_s: float
    arrivals: list[float]
    """Arrival time of each chunk of text."""
    prompt_tokens: int
    completion_tokens: int
    has_usage: bool
    """Whether the server reported token counts; if not, `completion_tokens` counts chunks."""
    error: str | None = None
    status: int = 200
    """Of the HTTP response; 200 if there was none."""

    @property
    def is_refused(self) -> bool:
        """Whether the server answered that the request itself is wrong: the next one like it would be, too."""
        return self.status in REFUSALS


AUTO, ADAPTERS = "auto", "adapters"
"""Values of --model that are not names."""


class ServerError(Exception):
    """The server can't be used. The message is for the user."""


class BenchClient:
    """Requests to one model of one server, or to several in turn, whose names have commas between them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, endpoint: str) -> None:
        self._session = session
        self._base = base_of(url)
        self.model = model
        self._num_sent = 0
        self._endpoint = endpoint
        self.url = self._base + ("/chat/completions" if endpoint == "chat" else "/completions")

    async def find_model(self) -> None:
        """Use the first model that the server lists; with the name ADAPTERS, all of its LoRA adapters in turn. Raises
        ServerError."""
        body = await self._json("GET", f"{self._base}/models")
        match body:
            case {"data": [_, *others]} if self.model == ADAPTERS:
                found = [one["id"] for one in others if isinstance(one, dict) and isinstance(one.get("id"), str)]
                self.model = ",".join(name for name in found if "," not in name)
                if not self.model:
                    raise ServerError(f"{self._base}/models lists no LoRA adapters, which --model {ADAPTERS} needs")
            case {"data": [{"id": str() as model}, *_]}:
                self.model = model
            case _:
                raise ServerError(f"{self._base}/models lists no model; name one with --model")

    async def count_tokens(self, prompt: str, options: dict[str, Any]) -> int:
        """Number of tokens of a prompt, from the usage of a request for one token. Raises ServerError."""
        body = await self._json("POST", self.url, self._body(prompt, options | {"max_tokens": 1}))
        match body:
            case {"usage": {"prompt_tokens": int() as num_tokens}} if num_tokens > 0:
                return num_tokens
        raise ServerError(f"{self.url} reports no usage, so prompts can't be sized in tokens; use --prompt-words")

    async def generate(
        self,
        prompt: str,
        options: dict[str, Any],
        tally: Tally | None = None,
        started: Callable[[], None] | None = None,
    ) -> RequestResult:
        """Stream one reply to its end. Errors of the server and the connection are in the result. `tally`, if given,
        must be new; it shows what has arrived so far. `started` is called when the first text has arrived."""
        data = self._body(prompt, options | {"stream": True, "stream_options": {"include_usage": True}})
        tally = tally or Tally(self._endpoint)
        status = 200
        sent_s = perf_counter()
        try:
            async with await self._post(data) as response:
                status = response.status
                if status == 200:
                    async for blob in response.content.iter_any():
                        tally.feed(blob, perf_counter())
                        if started is not None and tally.arrivals:
                            started()
                            started = None
                    tally.end(perf_counter())
                else:
                    tally.error = f"{status}: {refusal_of(status, await response.read())}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            tally.error = reason_of(error)
        return RequestResult(
            sent_s,
            perf_counter(),
            tally.arrivals,
            tally.prompt_tokens,
            tally.completion_tokens,
            tally.has_usage,
            tally.error,
            status,
        )

    async def _post(self, data: bytes) -> aiohttp.ClientResponse:
        """Send a request, a second time if the connection ends before an answer begins: some servers close a connection
        after a stream without announcing it, as llama.cpp's does, and its next request fails."""
        try:
            return await self._session.post(self.url, data=data)
        except aiohttp.ClientConnectorError:
            raise  # nothing listens there
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._session.post(self.url, data=data)

    def _body(self, prompt: str, options: dict[str, Any]) -> bytes:
        if self._endpoint == "chat":
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            asked = {"prompt": prompt}
        models = self.model.split(",")
        self._num_sent += 1
        return orjson.dumps({"model": models[self._num_sent % len(models)]} | asked | options)

    async def _json(self, method: str, url: str, data: bytes | None = None) -> Any:
        try:
            async with self._session.request(method, url, data=data) as response:
                body = await response.read()
                if response.status != 200:
                    raise ServerError(f"{url} answered {response.status}: {refusal_of(response.status, body)}")
                return orjson.loads(body)
        except aiohttp.ClientConnectorError as error:
            raise ServerError(no_connection(self._base, error)) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{url} {unanswered(self._base, error)}") from error
        except orjson.JSONDecodeError as error:
            raise ServerError(f"{url} did not answer with JSON") from error


NOT_AN_API = "a web page; does another program listen there? `pipeline ps` shows the addresses of servers"


def open_session(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session for any number of connections; `timeout_s` is each request's deadline."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
    )


def base_of(url: str) -> str:
    """The base URL of the API; `url` may or may not end in `/v1`."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def refusal_of(status: int, body: bytes) -> str:
    """The message of an error reply, or the start of its body, with advice if an API key is wrong or missing."""
    return message_of(body) + (f"; {KEY_ADVICE}" if status == UNAUTHORIZED else "")


def message_of(body: bytes) -> str:
    """The message of an error reply, or the start of its body, as one line; a web page is not repeated."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if parsed is not None:
        return error_text(parsed)
    if body.lstrip()[:16].lower().startswith((b"<!doctype", b"<html")):
        return NOT_AN_API
    return " ".join(body[:MAX_SHOWN_BYTES].decode("utf-8", "replace").split()) or "no words"


def no_connection(base: str, error: aiohttp.ClientConnectorError) -> str:
    """The message if no connection to an API could be made."""
    url = base.removesuffix("/v1")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"the certificate of {url} is not trusted ({why}); set SSL_CERT_FILE to a file of certificates to trust"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"{url} does not answer with TLS: is it an http:// address?"
    return no_server(url, os.strerror(error.errno) if error.errno else error.strerror or str(error))


def unanswered(url: str, error: BaseException) -> str:
    """The message if a server takes connections and does not answer."""
    is_closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    advice = ""
    if is_closed and url.startswith("http://"):
        advice = f"; if this port speaks HTTPS, use --url {url.removesuffix('/v1').replace('http://', 'https://', 1)}"
    return f"can't be reached: {reason_of(error)}{advice}"


def reason_of(error: BaseException) -> str:
    """The reason of a failed request."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
