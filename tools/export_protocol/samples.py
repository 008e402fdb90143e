"""Messages of every kind, and the transcripts of the documentation."""

import struct
from typing import Any

from pipeline.client import protocol as p


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


MAX_U64 = 2**64 - 1
_RECORDS = struct.pack("<f2i2ff2i2f", -0.125, 6, 300, -0.125, -2.5, -0.25, 7, 8, -0.25, -1.75)
"""Of two ids, each with the two likeliest"""


def generate(
    request_id: int, num_credits: int, received: list[bytes] | None = None, name: str | None = None, **fields: Any
) -> p.Generate:
    return p.Generate(request_id, p.Request(**fields), num_credits, received or [], name)


SAMPLES: dict[str, p.ClientMessage | p.ServerMessage] = {
    "hello": p.Hello(2, 2, "example/1.0"),
    "generate from text": generate(1, 16, prompt="Once upon a time", max_tokens=8),
    "generate from token ids": generate(
        2, 16, model="SmolLM2-135M-Instruct", prompt_token_ids=packed(1, 4093, 2, 49151), temperature=0.0
    ),
    "generate from a chat": generate(
        MAX_U64,
        1024,
        messages=[p.MessageParam("system", "Be brief."), p.MessageParam("user", "Hé 👋", "ada")],
        add_generation_prompt=False,
        n=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=MAX_U64,
        max_tokens=64,
        stop=["\n\n", "é"],
        stop_token_ids=[7, 128001],
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    ),
    "generate with a negative seed": generate(3, 1, prompt="x", seed=-(2**63)),
    "resume": generate(4, 16, [packed(504, 3575, 282)], prompt_token_ids=packed(1, 2), seed=7),
    "resume one of two": generate(5, 16, [packed(504), b""], prompt="x", n=2, seed=7),
    "hello with an API key": p.Hello(2, 2, "example/1.0", "sk-example-0123456789"),
    "abort": p.Abort(MAX_U64),
    "credit": p.Credit(1, 16),
    "ping": p.Ping(2**53 + 1),
    "bye": p.Bye(),
    "welcome": p.Welcome(2, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0),
    "welcome from the second of two gateways": p.Welcome(
        *(2, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0),
        addresses=["tcp://0.0.0.0:8001", "tcp://0.0.0.0:8002"],
        gateway=1,
        poolings=["last", "mean"],
        tasks=["generate", "embed"],
        defaults={"temperature": 0.6, "top_k": 20, "max_tokens": 512},
    ),
    "generate the best": generate(8, 1, prompt="x", n=2, best_of=4),
    "generate with a name and timings": generate(6, 1, name="user-7/story.3", prompt="x", timings=True),
    "generate with priority, salt and timeout": generate(
        7, 1, prompt="x", priority=-(2**31), cache_salt="tenant é", timeout_s=2.5
    ),
    "generate with penalties, bias, words and log probabilities": generate(
        9,
        1,
        prompt="x",
        max_tokens=4,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={"17": -100.0, "504": 2.5},
        allowed_token_ids=[17, 504, 49151],
        bad_words=["né", "never"],
        min_tokens=2,
        truncate_prompt_tokens=-1,
        logprobs=2,
        prompt_logprobs=0,
    ),
    "generate with log probabilities of given ids": generate(12, 1, prompt="x", logprob_token_ids=[17, 504, 49151]),
    "generate from the first ids": generate(14, 1, prompt="x", truncate_prompt_tokens=5, truncation_side="right"),
    "generate the best that a beam search finds": generate(
        15, 1, prompt="x", n=4, max_tokens=8, use_beam_search=True, length_penalty=0.5, early_stopping="never"
    ),
    "generate what matches a schema": generate(
        10, 1, prompt="x", structured_outputs=p.StructuredOutputsParam(json=p.json_text('{"type":"object"}'))
    ),
    "generate what is predicted": generate(16, 1, prompt="x", prediction=p.Prediction("content", "the same")),
    "compute an embedding": generate(13, 0, prompt="x", pooling="mean", dimensions=2),
    "score a pair": generate(14, 0, prompt="x", pair="y", task="score", use_activation=False),
    "generate from a chat with tools": generate(
        11,
        1,
        messages=[
            p.MessageParam("user", [p.ContentPart("text", "Is it cold"), p.ContentPart("text", "in Athens?")]),
            p.MessageParam(
                "assistant",
                tool_calls=[p.ToolCallParam(p.FunctionCall("weather", '{"city":"Athens"}'), "call-1")],
                reasoning="I have to look.",
            ),
            p.MessageParam("tool", "31 °C", tool_call_id="call-1"),
            p.MessageParam("assistant", "No, it"),
        ],
        add_generation_prompt=False,
        continue_final_message=True,
        tools=p.json_text('[{"type":"function","function":{"name":"weather"}}]'),
        tool_choice=p.json_text('{"type":"function","function":{"name":"weather"}}'),
        parallel_tool_calls=False,
        documents=p.json_text('[{"text":"It is hot."}]'),
        chat_template_kwargs=p.json_text('{"enable_thinking":false}'),
    ),
    "generate from a chat that requires a call": generate(
        17,
        1,
        messages=[p.MessageParam("user", "Is it cold?")],
        tools=p.json_text('[{"type":"function","function":{"name":"weather"}}]'),
        tool_choice=p.json_text("required"),
    ),
    "accepted": p.Accepted(1, packed(1, 4093, 2), MAX_U64, "cmpl-user-7/story.3"),
    "delta": p.Delta(1, [p.Output(0, " there was", packed(665, 436), 17, 4)]),
    "delta with ends": p.Delta(
        2**63,
        [
            p.Output(0, "", b"", 40, 12, "length"),
            p.Output(1, "né", packed(-1, 2**31 - 1), 0, 0, "stop", "é"),
            p.Output(2, "", packed(7), 9, 3, "stop", 7),
            p.Output(3, "", b"", 0, 0, "abort"),
        ],
    ),
    "accepted with pieces": p.Accepted(1, packed(5, 6), 7, "cmpl-1", [b"na", b"\xc3"]),
    "delta with records": p.Delta(
        1,
        [
            p.Output(
                0, "é", packed(6, 7), 0, 0, None, None, _RECORDS, [b"\xc3", b"\xc3", b"e", b"\xa9", b"\xa9", b"\xaa"]
            )
        ],
    ),
    "delta with records of the prompt": p.Delta(1, [], _RECORDS, 3, [b"a", b"e", b"", b"\xff"]),
    "finished": p.Finished(1, 5, 8),
    "finished with timings": p.Finished(1, 5, 8, '{"received":1.5,"total_ms":2.25,"choices":[]}'),
    "finished with cached tokens": p.Finished(1, 37, 8, None, [32, 37]),
    "finished with an embedding": p.Finished(1, 5, 0, None, [0], struct.pack("<2f", 0.6, -0.8)),
    "failed, to be tried again": p.Failed(1, p.Failure(503, "the server is overloaded", None, "overloaded", 4)),
    "failed": p.Failed(1, p.Failure(400, "'temperature' must be a number <= 2.0", "temperature", "invalid_value")),
    "failed without param and code": p.Failed(MAX_U64, p.Failure(500, "the server could not finish this request")),
    "pong": p.Pong(2**53 + 1),
    "set sleep": p.SetSleep(MAX_U64, True, True),
    "wake up": p.SetSleep(2, False),
    "ask sleep": p.AskSleep(3),
    "sleep state": p.SleepState(3, True),
    "sleep state, refused": p.SleepState(2, False, p.Failure(403, "this server can't sleep", None, "forbidden")),
    "error": p.Error(p.Failure(400, "the first message of a connection must be hello", None, "no_hello")),
}


_PARAMS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
_PROMPT_IDS = packed(33, 28, 216, 34, 28, 216, 35, 28)
_WELCOME = p.Welcome(2, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0)

TRANSCRIPT: list[p.ClientMessage | p.ServerMessage] = [
    p.Hello(2, 2, "example/1.0"),
    _WELCOME,
    generate(1, 2, prompt="1, 2, 3,", **_PARAMS),
    p.Accepted(1, _PROMPT_IDS, 8412906318461237094, "cmpl-5f0c1d3b9a7e42468d1f6b3a0c9e7512"),
    p.Delta(1, [p.Output(0, " ", packed(216), 0, 0)]),
    p.Credit(1, 1),
    p.Delta(1, [p.Output(0, "4, ", packed(36, 28, 216), 1, 1)]),
    p.Delta(1, [p.Output(0, "5,", packed(37, 28), 4, 4, "length")]),
    p.Finished(1, 8, 6),
    p.Bye(),
]
RESUMING: list[p.ClientMessage | p.ServerMessage] = [
    p.Hello(2, 2, "example/1.0"),
    _WELCOME,
    generate(1, 2, [packed(216, 36, 28, 216)], prompt_token_ids=_PROMPT_IDS, seed=8412906318461237094, **_PARAMS),
    p.Accepted(1, _PROMPT_IDS, 8412906318461237094, "cmpl-c2a4906be1d84f37b05d9c8e6f1a2374"),
    p.Delta(1, [p.Output(0, "5,", packed(37, 28), 4, 4, "length")]),
    p.Finished(1, 8, 6),
    p.Bye(),
]
