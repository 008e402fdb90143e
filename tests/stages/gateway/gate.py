"""A gateway with an HTTP socket; the test plays client, ingest, schedule, detokenize and supervisor."""

import json
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import numpy as np

from pipeline.config.settings import (
    ChatSettings,
    GatewaySettings,
    LimitSettings,
    LoraSettings,
    ScheduleSettings,
    Settings,
)
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import Pooler
from pipeline.stages.gateway.admin.handlers import GatewayParts
from pipeline.stages.gateway.http.app import Api
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from tests.rig import PATIENCE_S, Rig

FACTS = m.ExecuteFacts(num_blocks=64, block_size=16, max_model_len=512, vocab_size=1000, hidden_size=8)
MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
END = b"\r\n0\r\n\r\n"
"""The end of a chunked response."""
COMPLETION = {"model": MODEL, "prompt": "Hi"}
NONE_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
"""The last fields of a usage object."""


class Gate:
    """A context manager; entering it starts the stage and sends `Start`, unless `start` is false."""

    def __init__(
        self,
        folder: Path,
        *,
        start: bool = True,
        siblings: int = 0,
        record: Path | None = None,
        rig: type[Rig] = Rig,
        send_buffer_bytes: int = 0,
        policy: Literal["fcfs", "priority"] = "fcfs",
        chat: ChatSettings = ChatSettings(),  # noqa: B008 - frozen
        limits: LimitSettings = LimitSettings(),  # noqa: B008 - frozen
        served_model_name: str = "",
        aliases: tuple[str, ...] = (),
        generation_config: str = "auto",
        lora: LoraSettings = LoraSettings(),  # noqa: B008 - frozen
        pooler: Pooler | None = None,
        **gateway: Any,
    ) -> None:
        self.folder = folder
        ModelConfig(
            name=MODEL,
            architecture="llama",
            num_layers=1,
            hidden_size=8,
            intermediate_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=1000,
            max_position=512,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            tie_embeddings=True,
            eos_ids=[0],
            weight_files=[],
            pooler=pooler,
        ).save(folder)
        self._facts = FACTS if pooler is None else msgspec.structs.replace(FACTS, hidden_size=pooler.width)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        if send_buffer_bytes:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.address: tuple[str, int] = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._start = start
        self.rig = rig(
            "gateway",
            Settings(
                served_model_name=served_model_name,
                aliases=aliases,
                generation_config=generation_config,
                gateway=GatewaySettings(**gateway),
                schedule=ScheduleSettings(policy=policy),
                chat=chat,
                limits=limits,
                lora=lora,
            ),
            folder,
            listen_fd=listener.detach(),
            siblings=siblings,
            record=record,
        )
        self._threads = ThreadPoolExecutor(32)
        self._chars: dict[tuple[int, int], int] = {}
        self._ids: dict[tuple[int, int], int] = {}

    def __enter__(self) -> "Gate":
        self.rig.__enter__()
        if self._start:
            self.rig.start(self._facts)
            self.rig.load()  # it has started and accepts clients
        else:
            self.rig.receive("supervisor", m.Ready)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False)  # loads no certificates
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.rig.__exit__(*error)
        finally:
            self._threads.shutdown()
            self.client.close()

    # ------------------------------------------------------------------------------------------------- as a client

    def do(self, function: Any, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a blocking function in a thread beside the test."""
        return self._threads.submit(function, *args, **kwargs)

    def post(self, body: Any, path: str = "/v1/chat/completions") -> "Future[httpx.Response]":
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.do(self.client.post, path, content=content)

    def complete(self, body: Any) -> "Future[httpx.Response]":
        return self.post(body, "/v1/completions")

    def raw(self, body: Any, path: str = "/v1/chat/completions") -> socket.socket:
        """A raw connection that has sent a request."""
        connection = socket.create_connection(self.address, timeout=PATIENCE_S)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    def raw_head(self, header: str, path: str = "/v1/chat/completions") -> socket.socket:
        """A raw connection that has sent the head of a request."""
        connection = socket.create_connection(self.address, timeout=PATIENCE_S)
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
        return connection

    def raw_get(self, path: str) -> socket.socket:
        """A raw connection that has sent a GET."""
        connection = socket.create_connection(self.address, timeout=PATIENCE_S)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return connection

    # ------------------------------------------------------------------------------------------------ as the stages

    def submit(self) -> m.Submit:
        """The next request that ingest received."""
        return self.rig.receive("ingest", m.Submit)

    def begin(self) -> m.Submit:
        """The next request that ingest received, accepted."""
        submit = self.submit()
        self.accept(submit)
        return submit

    def accept(
        self,
        submit: m.Submit,
        num_ids: int = 3,
        *,
        pieces: list[bytes] | None = None,
        tail: str | None = None,
        segment_start: int = 0,
        budget: m.ReasoningBudget | None = None,
    ) -> None:
        """`pieces` are the bytes of the prompt's ids; `tail` is how the reply begins."""
        ids = np.arange(num_ids if pieces is None else len(pieces), dtype=np.int32)
        accepted = m.Accepted(
            submit.request_id,
            submit.attempt,
            ids.tobytes(),
            pieces=pieces,
            tail=tail,
            segment_start=segment_start,
            reasoning_budget=budget,
        )
        self.rig.send(accepted, "ingest.0")

    def reject(self, submit: m.Submit, failure: m.Failure, sender: str = "ingest.0") -> None:
        self.rig.send(m.Rejected(submit.request_id, submit.attempt, failure), sender)

    def delta(
        self,
        submit: m.Submit,
        text: str = "",
        num_ids: int = 1,
        *,
        index: int = 0,
        finish: m.Finish = m.Finish.NONE,
        stop_reason: str | int | None = None,
        back: int = 0,
        num_cached: int | None = None,
        logprobs: list[float] | None = None,
        token_outputs: bytes = b"",
        pieces: list[bytes] | None = None,
        prompt: tuple[int, bytes, list[bytes]] | None = None,
        error: str = "",
        drafts: tuple[int, int] | None = None,
        first: m.FirstTimes | None = None,
        settled_s: float = 0.0,
    ) -> None:
        """Send text and ids of a sequence. `back` is the number of characters and ids that repeat the end of what was
        sent before. `num_cached`, for a sequence's first ids, is the number of cached prompt tokens; `first` has their
        times too. `logprobs`, or `token_outputs` and `pieces`, belong to the ids; `prompt` is the offset, the records
        and the pieces of prompt ids."""
        if first is None and num_cached is not None:
            first = m.FirstTimes(0, 1.0, 1.0, 1.0, num_cached)
        key = submit.request_id, index
        chars, ids = self._chars.get(key, 0) - back, self._ids.get(key, 0) - back
        self._chars[key], self._ids[key] = chars + len(text), ids + num_ids
        self.rig.send(
            m.Deltas(
                [submit.request_id],
                [submit.attempt],
                [index],
                [text],
                [chars],
                np.arange(ids, ids + num_ids, dtype=np.int32).tobytes(),
                [ids],
                [num_ids],
                [int(finish)],
                [stop_reason],
                [] if first is None else [first],
                settled_s=settled_s,
                token_outputs=[np.array(logprobs, np.float32).tobytes()]
                if logprobs
                else [token_outputs]
                if token_outputs
                else [],
                pieces=[pieces] if pieces else [],
                prompt_indices=[0] if prompt else [],
                prompt_offsets=[prompt[0]] if prompt else [],
                prompt_logprobs=[prompt[1]] if prompt else [],
                prompt_pieces=[prompt[2]] if prompt else [],
                errors=[error] if finish == m.Finish.ERROR else [],
                drafts=[m.DraftCounts(0, *drafts)] if drafts else [],
            ),
            "detokenize.0",
        )

    def continue_at(self, submit: m.Submit, num_chars: int, num_ids: int, index: int = 0) -> None:
        """The client already has this much of a sequence."""
        self._chars[submit.request_id, index] = num_chars
        self._ids[submit.request_id, index] = num_ids

    def finish(self, submit: m.Submit, text: str = "", index: int = 0, finish: m.Finish = m.Finish.STOP) -> None:
        self.delta(submit, text, index=index, finish=finish)

    def serve(self, text: str = "Hello") -> m.Submit:
        """Play the stages for the next request: accept it and answer each of its sequences with `text`."""
        submit = self.begin()
        for index in range(submit.options.n):
            self.finish(submit, text, index)
        return submit

    def closed(self) -> tuple[int, int]:
        closed = self.rig.receive("schedule", m.Closed)
        return closed.request_id, closed.attempt


def idle_api(settings: GatewaySettings) -> Api:
    """The application of a gateway that serves no request."""
    none: Any = None
    return Api(GatewayParts(Readiness(), none, none, none, none, none, none, RequestLimits("x", 1), settings))


def ends_with_an_error(stream: bytes, message: str) -> bool:
    """Whether the rest of a stream ends with this error and contains no sign of success."""
    return (
        stream.endswith(b"}}\n\ndata: [DONE]\n\n" + END)
        and stream.count(b"[DONE]") == 1
        and stream.count(b'data: {"error":{"message":"%s"' % message.encode()) == 1
        and b'"finish_reason":"' not in stream
    )


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Read until `mark` is received. Fails if the connection ends or times out."""
    data = b""
    while mark not in data:
        more = connection.recv(1 << 20)
        assert more, f"the connection ended after {data[-500:]!r}"
        data += more
    return data


def events_of(text: str) -> list[Any]:
    """The decoded events of a stream, whose end must be well-formed."""
    assert text.endswith("data: [DONE]\n\n")
    lines = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]
