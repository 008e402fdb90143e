"""The chat dialects of the API: one reply in each, as its client keeps it, and as it sends it back."""

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from pipeline.client import protocol as p
from pipeline.client.client import ServerInfo
from pipeline.client.inputs.prompts import chat_of, chat_options_of
from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.stages.gateway.apis.anthropic.parsing import parse_messages
from pipeline.stages.gateway.apis.ollama.parsing import parse_chat as parse_ollama
from pipeline.stages.gateway.apis.openai.parsing import parse_chat
from pipeline.stages.gateway.apis.responses import handlers
from pipeline.stages.gateway.apis.responses.parsing import parse_response
from pipeline.stages.gateway.apis.responses.sizes import SizedItem
from pipeline.stages.gateway.apis.responses.store import ResponseStore, StoredResponse
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.zmq.stream import ZmqStream
from pipeline.text.formats.chat_formats import ChatFormats
from tests.stages.gateway.apis.responses.parsed import Stored
from tests.stages.gateway.gate import MODEL, events_of
from tests.stages.gateway.replies import test_messages
from tests.zmq_requests import generate
from tests.zmq_requests import parsed as over_zmq

Messages = list[dict[str, Any]]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "It."}, "days": {"type": "array", "description": "It."}},
}


class Dialect(NamedTuple):
    """`message`: what a client keeps of a whole reply. `streamed`: the same of a stream. `turns`: the messages or items
    that it sends back, with the text of each tool call's result."""

    parse: Callable[[bytes, RequestLimits], ParsedRequest]
    body: Callable[[Messages, Sequence[str]], dict[str, Any]]
    message: Callable[[Any], Any]
    streamed: Callable[[str], Any]
    turns: Callable[[Any, str], Messages]
    result: tuple[str, str] = ("role", "tool")
    """The last of the turns has this if it is a tool's result."""
    has_names: bool = False
    """Results name their tool."""
    loses_cut_calls: bool = False
    has_objects: bool = False
    """Arguments are objects, not texts."""
    keep: Callable[[Request], None] = lambda request: None
    """The server keeps the reply to this request."""
    is_plain: bool = False
    """A reply is its text, as the model wrote it."""

    def has_results(self, turns: Messages) -> bool:
        key, value = self.result
        return bool(turns) and turns[-1].get(key) == value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ----------------------------------------------------------------------------------------------------------------- chat


def _functions(names: Sequence[str]) -> Messages:
    return [
        {"type": "function", "function": {"name": name, "description": "It.", "parameters": SCHEMA}} for name in names
    ]


def _chat_body(messages: Messages, names: Sequence[str]) -> dict[str, Any]:
    return {"messages": messages, "tools": _functions(names)}


def _chat_streamed(text: str) -> dict[str, Any]:
    """As OpenAI's client accumulates it."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in events_of(text):
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def _chat_turns(message: dict[str, Any], result: str) -> Messages:
    calls = message.get("tool_calls") or ()
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls)]


# ------------------------------------------------------------------------------------------------------------- messages


def _messages_body(messages: Messages, names: Sequence[str]) -> dict[str, Any]:
    tools = [{"name": name, "description": "It.", "input_schema": SCHEMA} for name in names]
    return {"max_tokens": 9, "messages": messages, "tools": tools}


def _messages_turns(content: Messages, result: str) -> Messages:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": result}
        for block in content
        if block["type"] == "tool_use"
    ]
    turns: Messages = [{"role": "assistant", "content": content}]
    return [*turns, {"role": "user", "content": results}] if results else turns


# ------------------------------------------------------------------------------------------------------------ responses


def _parse_response(body: bytes, limits: RequestLimits) -> ParsedRequest:
    return parse_response(body, limits, Stored(), "seed").request


def _responses_body(messages: Messages, names: Sequence[str]) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "description": "It.", "parameters": SCHEMA} for name in names]
    return {"input": messages, "tools": tools}


def _responses_turns(output: Messages, result: str) -> Messages:
    return [
        *output,
        *(
            {"type": "function_call_output", "call_id": item["call_id"], "output": result}
            for item in output
            if item["type"] == "function_call"
        ),
    ]


class _Previous:
    """Clients that send `previous_response_id` instead of the conversation: the server has stored it."""

    def __init__(self) -> None:
        self._store = ResponseStore(4, 2**24)
        self._items: list[SizedItem] = []
        """Of the request that was parsed last"""

    def parse(self, body: bytes, limits: RequestLimits) -> ParsedRequest:
        found = parse_response(body, limits, handlers.Stored(self._store, "", "", 2**24), "seed")
        self._items = found.items
        return found.request

    def keep(self, request: Request) -> None:
        """Store the response to the request that was parsed last."""
        items = self._items
        request.on_response = lambda response: self._store.put(StoredResponse("", response, items))

    def body(self, messages: Messages, names: Sequence[str]) -> dict[str, Any]:
        """The first message is stored, and the second names the response to it."""
        if not messages[1:]:
            return _responses_body(messages, names)
        return _responses_body(messages[2:], names) | messages[1]

    def turns(self, response: dict[str, Any], result: str) -> Messages:
        results = [one for one in _responses_turns(response["output"], result) if one["type"] == "function_call_output"]
        return [{"previous_response_id": response["id"]}, *results]


PREVIOUS = _Previous()


# --------------------------------------------------------------------------------------------------------------- ZeroMQ

INFO = ServerInfo(MODEL, 10**4, 64, 10**4, 2, 100, "pipeline", 10**7)


def _parse_zmq(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """As `LLM.chat` sends it."""
    given = json.loads(body)
    prompt = chat_of(given["messages"], "messages", chat_options_of(True, False, given["tools"], None), INFO).prompt
    return over_zmq(generate(1, prompt), limits)


def _parse_chat_or_zmq(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """A conversation that began over HTTP goes on over ZeroMQ."""
    return (_parse_zmq if json.loads(body)["messages"][1:] else parse_chat)(body, limits)


def _zmq_reply(request: Request) -> str:
    """The text that a client has received."""
    sent: list[p.ServerMessage] = []
    channel: Any = SimpleNamespace(
        is_full=False, client=(False, ""), send=lambda message: not sent.append(message), post=sent.append
    )
    requests: Any = SimpleNamespace(release=lambda request: None)
    asyncio.run(ZmqStream(1, 100, request, requests).run(channel))
    return "".join(output.text for message in sent if isinstance(message, p.Delta) for output in message.outputs)


# --------------------------------------------------------------------------------------------------------------- ollama


def _ollama_body(messages: Messages, names: Sequence[str]) -> dict[str, Any]:
    return {"messages": messages, "tools": _functions(names)}


def _ollama_streamed(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in text.splitlines():
        part = json.loads(line)["message"]
        for name in ("content", "thinking"):
            if part.get(name):
                message[name] = message.get(name, "") + part[name]
        if calls := part.get("tool_calls"):
            message["tool_calls"] = message.get("tool_calls", []) + calls
    return message


def _ollama_turns(message: dict[str, Any], result: str) -> Messages:
    calls = message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_name": call["function"]["name"], "content": result} for call in calls]
    return [message, *results]


DIALECTS = {
    "chat": Dialect(parse_chat, _chat_body, lambda reply: reply["choices"][0]["message"], _chat_streamed, _chat_turns),
    "messages": Dialect(
        parse_messages,
        _messages_body,
        lambda reply: reply["content"],
        lambda text: test_messages.joined(test_messages.events_in(text))["content"],
        _messages_turns,
        ("role", "user"),
        has_objects=True,
    ),
    "responses": Dialect(
        _parse_response,
        _responses_body,
        lambda reply: reply["output"],
        lambda text: json.loads(text.rstrip().rpartition("data: ")[2])["response"]["output"],
        _responses_turns,
        ("type", "function_call_output"),
    ),
    "previous response": Dialect(
        PREVIOUS.parse,
        PREVIOUS.body,
        lambda reply: reply,
        lambda text: json.loads(text.rstrip().rpartition("data: ")[2])["response"],
        PREVIOUS.turns,
        ("type", "function_call_output"),
        keep=PREVIOUS.keep,
    ),
    "ZeroMQ": Dialect(
        _parse_zmq,
        _chat_body,
        lambda text: text,
        lambda text: text,
        lambda text, result: [{"role": "assistant", "content": text}],
        is_plain=True,
    ),
    "chat, then ZeroMQ": Dialect(
        _parse_chat_or_zmq, _chat_body, lambda reply: reply["choices"][0]["message"], _chat_streamed, _chat_turns
    ),
    "ollama": Dialect(
        parse_ollama,
        _ollama_body,
        lambda reply: reply["message"],
        _ollama_streamed,
        _ollama_turns,
        has_names=True,
        loses_cut_calls=True,
        has_objects=True,
    ),
}


# -------------------------------------------------------------------------------------------------------------- replies


def parsed(
    dialect: Dialect, messages: Messages, names: Sequence[str], formats: ChatFormats, stream: bool = False
) -> Any:
    """The parsed request with this conversation. Raises ApiError."""
    body = {"model": MODEL, "stream": stream} | dialect.body(messages, names)
    data = json.dumps(body, ensure_ascii=False).encode()
    return dialect.parse(data, RequestLimits(MODEL, 64, max_prompt_tokens=9999, formats=formats))


def prompt_of(request: ParsedRequest) -> m.ChatPrompt:
    (prompt,) = request.prompts
    assert isinstance(prompt, m.ChatPrompt)
    return prompt


def kept(
    dialect: Dialect,
    request: ParsedRequest,
    pieces: Sequence[str],
    finish: m.Finish,
    formats: ChatFormats,
    tail: str,
    *,
    overtakes: bool = False,
) -> Any:
    """What a client keeps of the reply to `request` that has this output, after `tail` at the prompt's end. If it
    `overtakes` these, it arrives before the prompt's ids and tail, all but its finish."""
    stage: Any = SimpleNamespace(replay_context=ReplayContext(), trace=SimpleNamespace(on=False))
    made = Request(request, stage, 1, formats)
    sequence = SequenceOutput()
    submit = m.Submit(1, 0, 0, 0.0, request.prompts[0], request.options)
    prompt_request = PromptRequest(submit, made, [sequence], 3)

    def accept() -> None:
        prompt_request.prompt_ids, prompt_request.tail = np.arange(3, dtype=np.int32), tail

    if not overtakes:
        accept()
    made.prompt_requests, made.sequences, made.num_open, made.has_begun = [prompt_request], [sequence], 1, True
    dialect.keep(made)
    if dialect.is_plain:
        for index, piece in enumerate(pieces):
            sequence.extend(piece, sequence.num_chars, np.array([index], np.int32).tobytes(), index)
        sequence.finish, made.num_open, prompt_request.is_closed = finish, 0, True
        return _zmq_reply(made)
    events = request.dialect.events(made) if request.stream else None
    data = b"" if events is None else events.first()
    for index, piece in enumerate(pieces):
        sequence.extend(piece, sequence.num_chars, np.array([index], np.int32).tobytes(), index)
        if events is not None:
            data += events.due()
    if overtakes:
        accept()
    sequence.finish, made.num_open, prompt_request.is_closed = finish, 0, True
    if events is None:
        return dialect.message(json.loads(request.dialect.whole(made)))
    data += events.due()
    assert events.are_over
    return dialect.streamed((data + events.last()).decode())
