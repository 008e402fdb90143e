"""The model's sampling defaults apply on every route and over ZeroMQ, to fields that a request does not give."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import LLM, SamplingParams
from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.stages.gateway.parsing.fill_in import FAMILIES
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate
from tests.stages.gateway.peers import RawPeer, address_of
from tests.zmq_requests import generate

RECOMMENDED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 20,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "max_new_tokens": 7,
}
SAMPLED = [name for name in RECOMMENDED if name != "max_new_tokens"]
OWN = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Given values win, also if they are zero or neutral."""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("recommended")
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(FAMILIES[0][:3])]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with Gate(folder) as gate:
        yield gate


def sampled(options: m.GenerationOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SAMPLED}


def posted(gate: Gate, path: str, body: dict[str, Any]) -> m.GenerationOptions:
    """The options with which the gateway submits a request. The request is refused then."""
    response = gate.post(body, path)
    submit = gate.submit()
    gate.reject(submit, m.Failure(400, "enough"))
    assert response.result().status_code == 400
    return submit.options


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {}},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_defaults_apply_on_every_route(gate: Gate, path: str) -> None:
    options = posted(gate, path, BODIES[path])
    assert sampled(options) == {name: RECOMMENDED[name] for name in SAMPLED}
    # Where the context is the default, ingest applies the model's maximum; completions have a default of their own.
    expected = {"/v1/messages": 9, "/v1/completions": 7, "/inference/v1/generate": 7}
    assert options.max_tokens == expected.get(path)


OTHERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "/api/chat": (CHAT, (0.8, 0.9, 40, 0.0, 1.0)),
    "/api/generate": ({"model": MODEL, "prompt": "Hi", "raw": True}, (0.8, 0.9, 40, 0.0, 1.0)),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, (0.8, 0.95, 40, 0.05, 1.0)),
}
"""Bodies of APIs with defaults of their own, and these, in the order of `SAMPLED`."""


@pytest.mark.parametrize("path", OTHERS)
def test_apis_with_defaults_of_their_own_keep_them(gate: Gate, path: str) -> None:
    body, expected = OTHERS[path]
    options = posted(gate, path, body)
    assert tuple(sampled(options).values()) == expected
    assert options.max_tokens is None, "ingest applies the model's maximum"


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_gives_takes_precedence(gate: Gate, path: str) -> None:
    body = BODIES[path]
    if path == "/v1/messages":  # it has no min_p and no repetition_penalty
        own = {name: value for name, value in OWN.items() if name in ("temperature", "top_p", "top_k")}
        assert sampled(posted(gate, path, {**body, **own})).items() >= own.items()
    elif path.endswith("generate"):
        own = {**OWN, "max_tokens": 100}
        options = posted(gate, path, {**body, "sampling_params": own})
        assert (sampled(options), options.max_tokens) == (OWN, 100)
    else:
        field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        options = posted(gate, path, {**body, **OWN, field: 100})
        assert (sampled(options), options.max_tokens) == (OWN, 100)


def test_null_is_the_models_default_over_zmq(gate: Gate) -> None:
    with RawPeer(address_of(gate)) as peer:
        assert peer.welcome.defaults == {**{name: RECOMMENDED[name] for name in SAMPLED}, "max_tokens": 7}
        recommended = {name: RECOMMENDED[name] for name in SAMPLED}
        given: list[dict[str, Any]] = [{}, dict.fromkeys(SAMPLED), OWN]
        for request_id, (params, expected) in enumerate(zip(given, [recommended, recommended, OWN], strict=True)):
            peer.send(generate(request_id, "Hi", params, 1))
            submit = gate.submit()
            assert sampled(submit.options) == expected
            assert submit.options.max_tokens is None
            gate.reject(submit, m.Failure(400, "enough"))
            peer.receive(p.Failed)


def test_an_llm_without_parameters_uses_the_defaults(gate: Gate) -> None:
    with LLM(address=address_of(gate)) as llm:
        expected = {name: RECOMMENDED[name] for name in SAMPLED}
        assert llm.get_default_sampling_params() == SamplingParams(**expected, max_tokens=None)
    with LLM(address=address_of(gate)) as llm:
        for given, options in ((None, expected), (SamplingParams(), {**OWN, "temperature": 1.0})):
            answer = gate.do(_refused, llm, given)
            submit = gate.submit()
            assert sampled(submit.options) == options
            assert submit.options.max_tokens == (None if given is None else 16)
            gate.reject(submit, m.Failure(400, "enough"))
            assert "enough" in answer.result()


def _refused(llm: LLM, params: SamplingParams | None) -> str:
    with pytest.raises(Exception, match="enough") as error:
        llm.generate("Hi", params, progress=False)
    return str(error.value)


def test_generation_config_turns_the_defaults_off(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    with Gate(tmp_path, generation_config="none") as gate:
        options = posted(gate, "/v1/completions", COMPLETION)
        assert sampled(options) == {**OWN, "temperature": 1.0}
        assert options.max_tokens == 16
