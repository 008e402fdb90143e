"""An integral float is an integer in every integer field, and keeps its form everywhere else."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.parsing import parse_messages
from pipeline.stages.gateway.apis.embeddings.parsing import parse_embeddings
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion, parse_detokenize
from pipeline.stages.gateway.apis.tokens.parsing import parse_tokens_only
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.parsing import integral_floats
from pipeline.stages.gateway.parsing.integral_floats import with_integers
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL
from tests.stages.gateway.parsing.bodies import LIMITS, refused

PROMPT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_chat, CHAT, "max_tokens"),
        (parse_chat, CHAT, "max_completion_tokens"),
        (parse_chat, CHAT, "n"),
        (parse_chat, CHAT, "seed"),
        (parse_chat, CHAT, "top_k"),
        (parse_chat, CHAT, "min_tokens"),
        (parse_chat, CHAT, "truncate_prompt_tokens"),
        (parse_chat, CHAT | {"logprobs": True}, "top_logprobs"),
        (parse_completion, COMPLETION, "logprobs"),
        (parse_completion, COMPLETION, "best_of"),
        (parse_completion, COMPLETION, "prompt_logprobs"),
        (parse_embeddings, {"input": "Hi"}, "dimensions"),
        (parse_messages, {"model": MODEL, "messages": PROMPT}, "max_tokens"),
    ],
)
def test_a_field_takes_an_integral_float_and_no_other(parse: Any, body: dict[str, Any], param: str) -> None:
    floats, integers = json.dumps(body | {param: 3.0}), json.dumps(body | {param: 3})
    assert floats != integers
    assert parse(floats.encode(), LIMITS) == parse(integers.encode(), LIMITS)
    assert refused(body | {param: 3.5}, parse).param == param


def test_ids_and_nested_fields_take_integral_floats() -> None:
    ids = np.array([1, 2, 3], "<i4").tobytes()
    body = json.dumps(COMPLETION | {"prompt": [[1.0, 2, 3e0], [3.0]], "stop_token_ids": [7.0]}).encode()
    parsed = parse_completion(body, LIMITS)
    assert (parsed.prompts, parsed.options.stop_token_ids) == ([m.IdsPrompt(ids), m.IdsPrompt(ids[8:])], [7])
    assert parse_detokenize(b'{"tokens": [1.0, 2, 3]}', LIMITS).prompts == [m.IdsPrompt(ids)]
    params = parse_tokens_only(b'{"token_ids": [1.0], "sampling_params": {"max_tokens": 4.0}}', LIMITS)
    assert params.options.max_tokens == 4
    assert refused(COMPLETION | {"prompt": [1.0, 2.5]}, parse_completion).param == "prompt[1]"


def test_other_fields_keep_their_bytes() -> None:
    schema = '{"maximum": 3.0,  "x": 1.50}'
    body = f'{{"model": "{MODEL}", "max_tokens": 2.0, "temperature": 1.0, "prompt": "1.0", "guided_json": {schema}}}'
    parsed = parse_completion(body.encode(), LIMITS)
    assert parsed.options.grammar is not None and parsed.options.grammar.source == schema
    assert (parsed.options.max_tokens, parsed.prompts) == (2, [m.TextPrompt("1.0")])
    chat = parse_chat(json.dumps(CHAT | {"n": 1.0, "chat_template_kwargs": {"a": 1.0}}).encode(), LIMITS)
    assert isinstance(chat.prompts[0], m.ChatPrompt) and chat.prompts[0].template_kwargs == '{"a":1.0}'


@pytest.mark.parametrize("number", ["9007199254740992.0", "1e400", "-1e300", "0.5", "NaN"])
def test_a_float_that_is_not_exact_stays_a_float(number: str) -> None:
    error = refused(f'{{"model": "{MODEL}", "prompt": "x", "seed": {number}}}'.encode(), parse_completion)
    assert (error.status, error.param) == (400, "seed")


@pytest.mark.parametrize("body", [b"", b"{", b'{"n": 1.0', b"[1.0]", b'{"n": 1.0, "x": [[}'])
def test_what_is_not_an_object_is_left_to_the_decoder(body: bytes) -> None:
    for route in ROUTES:
        if route.body is not None:
            assert with_integers(body, route.body) == body


def test_every_integer_field_of_every_route_is_found() -> None:
    """Written out for one route; for the others it is the same walk over their types."""
    completion = next(route.body for route in ROUTES if route.path == "/v1/completions")
    fields = {field.name for field in msgspec.structs.fields(completion) if "int" in str(field.type)}
    assert fields == set(integral_floats._fields_of(completion))
