"""Requests of every kind, and what a client has received of each in the end, for comparing a run in which a stage dies
with an undisturbed one."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import aiohttp

TIMEOUT_S = 120.0

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
STORY = "Once upon a time, in a village by the sea, there lived a fisherman who"
QUESTION = [{"role": "user", "content": "Tell me about the tides, and why there are two of them a day."}]
LONG = "The tides rise and fall twice a day, because the moon and the sun pull at the sea. " * 8
"""So long that the blocks of its prefix are worth more than those of all other prompts together."""
THOUGHT = "<think>\nThe user asks about the tides. Those come from"


def requests(max_tokens: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By kind: path and body."""
    text = {"prompt": STORY, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    chat = {"messages": QUESTION, "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
    sampled = {"temperature": 1.0, "seed": 7}
    thinking = {
        "messages": [*QUESTION, {"role": "assistant", "content": THOUGHT}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    return {
        "greedy": ("/v1/completions", text | {"temperature": 0}),
        "seeded": ("/v1/completions", text | sampled),
        "penalties": (
            "/v1/completions",
            text | sampled | {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        ),
        "stop string": ("/v1/chat/completions", chat | {"temperature": 0, "stop": ["gravit", "moon's"]}),
        "n = 3": ("/v1/completions", text | sampled | {"n": 3}),
        "logprobs": ("/v1/chat/completions", chat | sampled | {"logprobs": True, "top_logprobs": 3}),
        "prompt_logprobs": ("/v1/completions", text | sampled | {"prompt_logprobs": 2, "logprobs": 1, "stream": False}),
        "JSON schema": (
            "/v1/chat/completions",
            chat
            | sampled
            | {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        ),
        "tool call": ("/v1/chat/completions", chat | sampled | {"tools": [TOOL], "tool_choice": "required"}),
        "best_of": ("/v1/completions", text | sampled | {"n": 1, "best_of": 3, "stream": False}),
        "whole chat": ("/v1/chat/completions", chat | sampled | {"stream": False}),
        "embedding": ("/v1/embeddings", {"input": [STORY, "The tides."]}),
        "priority": ("/v1/completions", text | sampled | {"priority": 3, "seed": 11}),
        "echo": ("/v1/completions", text | sampled | {"echo": True, "seed": 12}),
        "prefix hit": ("/v1/completions", text | sampled | {"prompt": f"{LONG}A fisherman"}),
        "reasoning": ("/v1/chat/completions", chat | sampled | thinking),
        "reasoning budget": (
            "/v1/chat/completions",
            chat
            | sampled
            | thinking
            | {"thinking_token_budget": 7, "reasoning_budget_message": " But now it is time for an answer."},
        ),
    }


class Ledger:
    """What the clients have received: for each kind, text, ids, logprobs, calls and finish of each choice."""

    def __init__(self) -> None:
        self.received: dict[str, Any] = {}
        self.num_events = 0
        self._on_event: Callable[[int], None] | None = None

    def event(self) -> None:
        self.num_events += 1
        if self._on_event is not None:
            self._on_event(self.num_events)

    def on_event(self, call: Callable[[int], None]) -> None:
        """Call this with the number of events so far, at each event."""
        self._on_event = call


async def run(url: str, kinds: dict[str, tuple[str, dict[str, Any]]], ledger: Ledger) -> dict[str, Any]:
    """Make all requests at once. Returns by kind what their clients received."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        async with asyncio.TaskGroup() as tasks:
            running = {
                kind: tasks.create_task(_one(session, path, body, ledger)) for kind, (path, body) in kinds.items()
            }
        return {kind: task.result() for kind, task in running.items()}


async def _one(session: aiohttp.ClientSession, path: str, body: dict[str, Any], ledger: Ledger) -> Any:
    async with session.post(path, json=body) as response:
        if not body.get("stream"):
            reply = await response.json()
            assert response.status == 200, reply
            ledger.event()
            return _stable(reply)
        assert response.status == 200, await response.text()
        choices: dict[int, dict[str, Any]] = defaultdict(
            lambda: {"text": "", "reasoning": "", "ids": [], "logprobs": [], "calls": ""}
        )
        is_done = False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            assert "error" not in event, event
            ledger.event()
            for choice in event["choices"]:
                _add(choices[choice["index"]], choice)
        assert is_done, "the stream broke off"
        return dict(choices)


def _add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    """Append a chunk to what was received."""
    delta = choice.get("delta") or {}
    assert "finish" not in whole or not (delta.get("content") or choice.get("text")), "text came after the finish"
    whole["text"] += choice.get("text") or delta.get("content") or ""
    whole["reasoning"] += delta.get("reasoning_content") or ""
    whole["ids"] += choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    whole["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
    for call in delta.get("tool_calls") or []:
        function = call["function"]
        whole["calls"] += f"{function.get('name') or ''}{function.get('arguments') or ''}"
    if choice.get("finish_reason"):
        assert "finish" not in whole, "two finishes"
        whole["finish"] = choice["finish_reason"], choice.get("stop_reason")


def _stable(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs from call to call, such as how much of the prompt was cached."""
    kept = {key: value for key, value in reply.items() if key in ("choices", "data", "usage", "prompt_logprobs")}
    if "usage" in kept:
        kept["usage"] = {key: value for key, value in kept["usage"].items() if key != "prompt_tokens_details"}
    return kept
