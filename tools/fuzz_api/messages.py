"""Cases for the ZeroMQ protocol: random messages of each type, right and wrong ones."""

import asyncio
import functools
import random
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from msgspec import inspect

from pipeline.client import protocol as p
from pipeline.client.protocol.conversation import Conversation
from tools.fuzz_api.http import Problem, is_expected
from tools.fuzz_api.mutations import NUMBERS, OTHERS, TEXTS

MAX_MESSAGES = 5
NONCE = 4711
TYPES = (p.Hello, p.Generate, p.Abort, p.Credit, p.Ping, p.Bye)
WEIGHTS = (1, 12, 3, 3, 3, 1)
HELLO = msgspec.msgpack.encode(p.Hello(2, 2, "fuzz"))
PROMPT = ("model", "prompt", "prompt_token_ids", "messages", "pooling", *Conversation.__annotations__)
POOLED = (
    *({"task": task} for task in ("embed", "token_embed", "classify", "token_classify", "score")),
    *({"pooling": pooling} for pooling in ("last", "mean", "cls", "max")),
    {"task": "score", "pair": "c d"},
)
"""What makes a message one for a model's pooler."""
PING = msgspec.msgpack.encode(p.Ping(NONCE))


def messages(seed: int, number: int) -> list[list[bytes]]:
    """The messages of a case, each a list of frames."""
    rng = random.Random(f"{seed}:zmq:{number}")
    found = [] if rng.random() < 0.1 else [[HELLO]]
    for _ in range(rng.randint(1, MAX_MESSAGES)):
        kind = rng.choices(TYPES, WEIGHTS)[0]
        value = _of(_info(kind), rng, 0)
        if kind is p.Generate and rng.random() < 0.7:
            prompt = {"prompt": "a b"} if rng.random() < 0.5 else {"prompt_token_ids": bytes(8)}
            kept = {name: one for name, one in value[2].items() if rng.random() < 0.2 and name not in PROMPT}
            how = rng.choice(POOLED) if rng.random() < 0.2 else {"max_tokens": rng.randint(1, 3)}
            value[2] = {**kept, **prompt, **how}
        if rng.random() < 0.2:
            value = _spoiled(value, rng)
        data = msgspec.msgpack.encode(value)
        if rng.random() < 0.1:
            index = rng.randrange(len(data) + 1)
            data = rng.choice((data[:index], data[:index] + rng.randbytes(3) + data[index:], rng.randbytes(50)))
        frames = [data]
        if rng.random() < 0.03:
            frames = rng.choice(([b"", data], [data, data], [b"\x00" * 100_000], [b""]))
        found.append(frames)
    return found


async def send(context: zmq.asyncio.Context, address: str, case: list[list[bytes]], deadline_s: float) -> str:
    """Send a case on a connection of its own; the server must answer a ping behind it, or end the connection with a
    reason. Returns which. Raises Problem."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl = -1
    ended = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
    try:
        socket.connect(address)
        is_bye = any(frames[-1][1:5] == b"\xa3bye" for frames in case)
        end_s = asyncio.get_running_loop().time() + deadline_s
        for frames in [*case, [PING]]:
            sending = asyncio.ensure_future(socket.send_multipart(frames))
            await asyncio.wait(
                (sending, asyncio.ensure_future(ended.poll())), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not sending.done():  # there is no connection any more
                sending.cancel()
                break
        while True:
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise Problem(f"no pong and no end within {deadline_s:g} s")
            if await socket.poll(min(left_s * 1000, 50)):
                try:
                    reply = msgspec.msgpack.decode(await socket.recv(zmq.NOBLOCK))
                except zmq.Again:  # the connection has just ended
                    await asyncio.sleep(0.01)
                    continue
                took_s = asyncio.get_running_loop().time() + deadline_s - end_s
                if (
                    reply[0] in ("failed", "error")
                    and reply[-1][0] >= 500
                    and not is_expected(reply[-1][0], reply[-1][1], took_s)
                ):
                    raise Problem(f"a failure of the server: {reply}")
                if reply == ["pong", NONCE]:
                    return "pong"
                if reply[0] == "error":
                    return "error"
            elif await ended.poll(0):
                return "bye" if is_bye else "closed"
    finally:
        socket.disable_monitor()
        ended.close(0)
        socket.close(0)


@functools.cache
def _info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _of(info: Any, rng: random.Random, depth: int) -> Any:
    """A value for a type, as it is on the wire."""
    match info:
        case inspect.Metadata():
            return _of(info.type, rng, depth)
        case inspect.StructType(array_like=False):
            given = (field for field in info.fields if field.required or rng.random() < 0.3)
            return {field.name: _of(field.type, rng, depth + 1) for field in given}
        case inspect.StructType():
            fields = [_of(field.type, rng, depth + 1) for field in info.fields]
            num = len(fields) if depth or rng.random() < 0.5 else rng.randint(len(fields) // 2, len(fields))
            return [*([info.tag] if info.tag is not None else []), *fields[:num]]
        case inspect.UnionType():
            nones = [one for one in info.types if isinstance(one, inspect.NoneType)]
            return _of(nones[0] if nones and rng.random() < 0.7 else rng.choice(info.types), rng, depth)
        case inspect.RawType():
            return rng.choice(('[{"type":"function","function":{"name":"a"}}]', '{"type":"object"}', "auto", "[", None))
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.IntType():
            return (
                rng.choice((0, 1, 2, 7, rng.choice((2**31 - 1, 2**63 - 1)))) if info.ge is None or info.ge <= 0 else 1
            )
        case inspect.FloatType():
            return rng.choice((0.0, 0.5, 1.0, 1.5))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.BytesType():
            return b"".join(rng.randrange(600).to_bytes(4, "little") for _ in range(rng.randint(0, 6)))
        case inspect.NoneType():
            return None
        case inspect.ListType() | inspect.VarTupleType():
            return [_of(info.item_type, rng, depth + 1) for _ in range(rng.randint(0, 2 if depth < 5 else 0))]
        case inspect.DictType():
            return {
                _of(info.key_type, rng, depth + 1): _of(info.value_type, rng, depth + 1)
                for _ in range(rng.randint(0, 1))
            }
    return rng.choice(TEXTS) if rng.random() < 0.2 else rng.choice(("", "tiny", "Hi", "user", "a b"))


def _spoiled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        return {**value, name: _spoiled(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], _spoiled(value[index], rng), *value[index + 1 :]]
    numbers = [one for one in NUMBERS if not isinstance(one, int) or -(2**63) <= one < 2**64]
    return rng.choice((*numbers, *TEXTS, *OTHERS, b"\xff" * 9))
