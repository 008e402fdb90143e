"""One request over HTTP or ZeroMQ, and its outcome."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import aiohttp
import msgspec
import orjson

from pipeline.cli.bench.client import ServerError, message_of, reason_of
from pipeline.client.client import AsyncClient
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.inputs.sampling_params import SamplingParams
from tools.soak.endings import ReplyState
from tools.soak.patience import patience
from tools.soak.requests import EXTRAS, RandomRequest

PATIENCE_S = 300.0
"""Every reply must end within this time."""
TIMED_OUT = (408, 504)
"""Statuses allowed for a request with a deadline."""
OVERLOADED = 503

Kind = Literal["ended", "left", "refused", "timed out", "suspected", "unloaded", "wrong"]


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a request. Only `wrong` is a fault of the server."""

    kind: Kind
    words: str = ""


async def over_http(session: aiohttp.ClientSession, url: str, model: str, ask: RandomRequest) -> Outcome:
    """Send a request to /v1/completions, and check the reply."""
    body = {"model": model, "prompt": ask.prompt, "stream": ask.streams} | ask.params | ask.extras

    async def answered() -> Outcome:
        async with session.post(f"{url}/v1/completions", data=orjson.dumps(body)) as response:
            if response.status != 200:
                return of_status(response.status, message_of(await response.read()), ask)
            endings = ReplyState(ask.n)
            error = await (_read_events if ask.streams else _read_whole)(response, endings)
            return _judged(error, endings, ask)

    return await _patiently(answered, ask)


async def _read_whole(response: aiohttp.ClientResponse, endings: ReplyState) -> str | None:
    reply = orjson.loads(await response.read())
    for choice in reply["choices"]:
        endings.feed(choice["index"], True, choice["finish_reason"])
    return None


async def _read_events(response: aiohttp.ClientResponse, endings: ReplyState) -> str | None:
    """Returns the error in the stream, if there is one."""
    is_done, error = False, None
    async for line in response.content:
        payload = line.strip().removeprefix(b"data:").strip()
        if not payload or payload.startswith(b":"):
            continue
        if is_done:
            endings.complaints.append("an event after [DONE]")
        if payload == b"[DONE]":
            is_done = True
            continue
        event = orjson.loads(payload)
        if event.get("error") is not None:
            error = message_of(payload)
        for choice in event.get("choices") or ():
            endings.feed(choice["index"], bool(choice.get("text")), choice.get("finish_reason"))
    if not is_done and error is None:
        endings.complaints.append("the stream ended without [DONE]")
    return error


async def over_zmq(client: AsyncClient, ask: RandomRequest, adapter: str | None = None) -> Outcome:
    """Send a request over ZeroMQ, and check the reply."""
    params, options = _for_zmq(ask)
    endings = ReplyState(ask.n)

    async def answered() -> Outcome:
        try:
            stream = client.generate(ask.prompt, params, adapter=adapter, **options)
            leaving = None
            if ask.leave_after_s is not None and ask.says_so:
                leaving = asyncio.get_running_loop().call_later(ask.leave_after_s, stream.abort)
            try:
                async for output in stream:
                    endings.feed(output.index, bool(output.text or output.token_ids), output.finish_reason)
            finally:
                if leaving is not None:
                    leaving.cancel()
        except RequestError as error:
            return of_status(error.status, error.message, ask)
        if ask.leave_after_s is not None and not endings.reasons:
            return Outcome("left")  # aborted before it was accepted
        return _judged(None, endings, ask)

    return await _patiently(answered, ask, leaves=not ask.says_so)


def _for_zmq(ask: RandomRequest) -> tuple[SamplingParams, dict[str, Any]]:
    """Sampling parameters, and the request's other arguments; extras go where the client accepts them."""
    inside = {name: ask.extras[name] for name in ask.extras if name in SamplingParams.__struct_fields__}
    beside = {name: ask.extras[name] for name in ask.extras if name in _GENERATE}
    return SamplingParams(**ask.params, **inside), beside


_GENERATE = tuple(inspect.signature(AsyncClient.generate).parameters)


async def _patiently(answered: Callable[[], Awaitable[Outcome]], ask: RandomRequest, leaves: bool = True) -> Outcome:
    """Wait for a reply for as long as this client does."""
    is_leaving = leaves and ask.leave_after_s is not None
    limit_s = ask.leave_after_s if is_leaving else PATIENCE_S
    try:
        async with patience(limit_s or 0.0) as timeout:
            return await answered()
    except TimeoutError as error:
        if timeout.expired():
            return Outcome("left") if is_leaving else Outcome("wrong", f"no end within {PATIENCE_S:g} s")
        return Outcome("wrong", reason_of(error))
    except (aiohttp.ClientError, OSError, ConnectionLost) as error:
        return Outcome("wrong", f"the connection broke: {reason_of(error)}")
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        return Outcome("wrong", f"an answer that can't be read: {error!r}")


SUSPECTED = " times while it worked on this request"
"""In the error of a request that was in work each time that a stage died."""


def of_status(status: int, message: str, ask: RandomRequest) -> Outcome:
    """The outcome of an error reply."""
    if status == OVERLOADED:
        return Outcome("refused")
    if SUSPECTED in message:
        return Outcome("suspected")
    if status in TIMED_OUT and "timeout_s" in ask.extras:
        return Outcome("timed out")
    return Outcome("wrong", f"{status}: {message}")


def _judged(error: str | None, endings: ReplyState, ask: RandomRequest) -> Outcome:
    has_deadline = "timeout_s" in ask.extras
    if error is not None and SUSPECTED in error:
        return Outcome("suspected")
    if error is not None:
        return Outcome("timed out") if has_deadline else Outcome("wrong", f"error in the stream: {error}")
    if complaints := endings.end():
        return Outcome("wrong", "; ".join(complaints))
    odd = set(endings.reasons.values()) - {"stop", "length"}
    if not odd:
        return Outcome("ended")
    if has_deadline:
        return Outcome("timed out")
    if odd == {"abort"} and ask.leave_after_s is not None:
        return Outcome("left")
    return Outcome("wrong", f"finish_reason {', '.join(sorted(odd))}")


async def known_extras(session: aiohttp.ClientSession, url: str, model: str) -> frozenset[str]:
    """The EXTRAS that this server accepts, found by trying each. Raises ServerError."""
    tries = {"priority": 1, "cache_salt": "red", "timeout_s": 60.0}
    assert set(tries) == set(EXTRAS)
    known = []
    for name, value in tries.items():
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 1, name: value}
        async with session.post(f"{url}/v1/completions", data=orjson.dumps(body)) as response:
            said = message_of(await response.read())
            if response.status == 200:
                known.append(name)
            elif response.status != 400 or name not in said:
                raise ServerError(f"{name}: {response.status}: {said}")
    return frozenset(known)
