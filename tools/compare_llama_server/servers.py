"""Starts Pipeline and llama.cpp's server on a file, and asks both the same."""

import contextlib
import http.client
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from tools.compare_peers import children
from tools.compare_peers.children import Tell

START_S, REPLY_S = 180.0, 60.0
CONTEXT = 4096


class ErrorReply(NamedTuple):
    """An error reply. Two are equal whatever they say."""

    status: int
    message: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorReply)

    def __hash__(self) -> int:
        return 0


class Rendered(NamedTuple):
    """A chat as a prompt: its text without BOS and EOS that the tokenizer adds, and its ids."""

    text: str
    ids: list[int]


class Reply(NamedTuple):
    """A greedy reply. `ends` is true if a token of the model ended it. `ids` lacks that token."""

    text: str
    ends: bool
    ids: list[int]
    logprobs: list[float]


class Server(Protocol):
    """What is asked of both."""

    def tokenize(self, text: str, *, special: bool, ends: bool) -> list[int] | ErrorReply:
        """The ids of a text: with its special tokens as such or as text, with or without BOS and EOS."""

    def detokenize(self, ids: Sequence[int]) -> str | ErrorReply:
        """The text of ids, with special tokens."""

    def render(self, body: Mapping[str, Any]) -> Rendered | ErrorReply:
        """The prompt of a chat."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Reply | ErrorReply:
        """A completion of ids."""

    def chat(self, body: Mapping[str, Any], max_tokens: int) -> Reply | ErrorReply:
        """A reply to a chat. `logprobs` is empty."""


class Api:
    """JSON over one connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=REPLY_S)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The reply, or ErrorReply for a status above 399. Raises OSError, or HTTPException."""
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        if response.status >= 400:
            return ErrorReply(response.status, data.decode("utf-8", "replace")[:500])
        return json.loads(data)

    def get(self, path: str) -> Any:
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())

    def close(self) -> None:
        self._connection.close()


GREEDY = {"temperature": 0, "seed": 1}


class Pipeline:
    """Pipeline as a `Server`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def tokenize(self, text: str, *, special: bool, ends: bool) -> list[int] | ErrorReply:
        if special:
            body: dict[str, Any] = {"prompt": text, "add_special_tokens": ends}
        else:  # the template must be `forms.CONTENT`
            message = {"role": "user", "content": text}
            body = {"messages": [message], "add_special_tokens": ends, "add_generation_prompt": False}
        return _ids(self._api.post("/tokenize", body))

    def detokenize(self, ids: Sequence[int]) -> str | ErrorReply:
        return _text(self._api.post("/detokenize", {"tokens": ids}), "prompt")

    def render(self, body: Mapping[str, Any]) -> Rendered | ErrorReply:
        found = self._api.post("/v1/chat/completions/render", body)
        return found if isinstance(found, ErrorReply) else Rendered(found["prompt"], found["token_ids"])

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Reply | ErrorReply:
        asked = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0, "return_token_ids": True, **GREEDY}
        found = self._api.post("/v1/completions", asked)
        if isinstance(found, ErrorReply):
            return found
        (choice,) = found["choices"]
        return _reply(choice, choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def chat(self, body: Mapping[str, Any], max_tokens: int) -> Reply | ErrorReply:
        asked = {**body, "max_tokens": max_tokens, "return_token_ids": True, **GREEDY}
        found = self._api.post("/v1/chat/completions", asked)
        if isinstance(found, ErrorReply):
            return found
        (choice,) = found["choices"]
        return _reply(choice, choice["message"].get("content") or "", choice["token_ids"], [])


class LlamaServer:
    """llama.cpp's server as a `Server`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def tokenize(self, text: str, *, special: bool, ends: bool) -> list[int] | ErrorReply:
        body = {"content": text, "add_special": ends, "parse_special": special}
        return _ids(self._api.post("/tokenize", body))

    def detokenize(self, ids: Sequence[int]) -> str | ErrorReply:
        return _text(self._api.post("/detokenize", {"tokens": ids}), "content")

    def render(self, body: Mapping[str, Any]) -> Rendered | ErrorReply:
        """Its chats become ids as all prompts do."""
        text = _text(self._api.post("/apply-template", body), "prompt")
        if isinstance(text, ErrorReply):
            return text
        ids = self.tokenize(text, special=True, ends=True)
        return ids if isinstance(ids, ErrorReply) else Rendered(text, ids)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Reply | ErrorReply:
        asked = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "cache_prompt": False, **GREEDY}
        return self._reply("/v1/completions", asked)

    def chat(self, body: Mapping[str, Any], max_tokens: int) -> Reply | ErrorReply:
        more = {"max_tokens": max_tokens, "logprobs": True, "top_logprobs": 1, "cache_prompt": False}
        return self._reply("/v1/chat/completions", {**body, **more, **GREEDY})

    def _reply(self, path: str, asked: Mapping[str, Any]) -> Reply | ErrorReply:
        found = self._api.post(path, asked)
        if isinstance(found, ErrorReply):
            return found
        (choice,) = found["choices"]
        text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
        tokens = (choice.get("logprobs") or {}).get("content") or []
        return _reply(choice, text, [token["id"] for token in tokens], [token["logprob"] for token in tokens])


def _text(found: Any, name: str) -> str | ErrorReply:
    return found if isinstance(found, ErrorReply) else str(found[name])


def _ids(found: Any) -> list[int] | ErrorReply:
    return found if isinstance(found, ErrorReply) else list(found["tokens"])


def _reply(choice: Mapping[str, Any], text: str, ids: list[int], logprobs: list[float]) -> Reply:
    return Reply(text, choice["finish_reason"] == "stop", ids, logprobs)


@contextlib.contextmanager
def both(
    program: Path, file: Path, cache: Path, logs: Path, tell: Tell, *, specials_in_content: bool
) -> Iterator[tuple[Pipeline, LlamaServer]]:
    """Serve a file with both. `specials_in_content`: special tokens in messages are special for Pipeline, too. Raises
    UserError with the end of the log if one does not start."""
    flag = "true" if specials_in_content else "false"
    settings = {
        "gateway.port": "{port}",
        "model": str(file),
        "cache_dir": str(cache),
        "max_model_len": str(CONTEXT),
        "execute.kv_cache_bytes": "16MiB",
        "execute.num_threads": "1",
        "chat.allow_special_tokens_in_content": flag,
        "supervisor.crash_reports": "false",
    }
    ours = [sys.executable, "-m", "pipeline", "serve"]
    ours += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    theirs = [
        *(str(program), "--model", str(file), "--host", "127.0.0.1", "--port", "{port}", "--jinja"),
        *("--ctx-size", str(CONTEXT), "--parallel", "1", "--threads", "1", "--threads-batch", "1", "--no-warmup"),
        *("--cache-type-k", "f32", "--cache-type-v", "f32", "--fit", "off", "--cache-ram", "0"),
    ]
    with (
        children.serving("llama-server", theirs, logs / "llama-server.log", START_S, tell) as llama,
        children.serving("Pipeline", ours, logs / "pipeline.log", START_S, tell) as pipeline,
        contextlib.closing(Api(pipeline.url)) as our_api,
        contextlib.closing(Api(llama.url)) as their_api,
    ):
        yield Pipeline(our_api), LlamaServer(their_api)
