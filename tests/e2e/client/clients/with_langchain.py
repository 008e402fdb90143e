"""langchain-openai: chats, streams, tools, structured output, embeddings of texts and of ids."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import tiktoken
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "What is the capital of Greece?"


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Athens", "Cairo", "Oslo"]
    num_nights: int = Field(ge=1, le=9)
    by_train: bool


@tool
def weather(city: Literal["Athens", "Cairo"], unit: Literal["celsius", "kelvin"]) -> str:
    """The weather in a city."""
    return f"22 {unit} in {city}"


@tool
def time_in(city: Literal["Athens", "Cairo"]) -> str:
    """The current time in a city."""
    return f"noon in {city}"


@pytest.fixture
def chat(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=80,
        stream_usage=True,
    )


def test_a_chat_is_answered(chat: ChatOpenAI, model: str) -> None:
    reply = chat.invoke([SystemMessage("Answer in one sentence."), HumanMessage(QUESTION)])
    assert isinstance(reply.content, str) and "Athens" in reply.content
    assert reply.response_metadata["model_name"] == model
    assert reply.response_metadata["finish_reason"] == "stop"
    usage = reply.usage_metadata
    assert usage is not None and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


def test_a_stream_adds_up_to_the_reply(chat: ChatOpenAI) -> None:
    chat.invoke(QUESTION)  # fills the prefix cache, so that both requests find the same prefix
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == whole.content
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert total.usage_metadata is not None and whole.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


async def _many(chat: ChatOpenAI) -> list[str]:
    replies = await chat.abatch([QUESTION, "What is the capital of Egypt?"])
    streamed = [chunk.content async for chunk in chat.astream(QUESTION)]
    return [*(str(reply.content) for reply in replies), "".join(map(str, streamed))]


def test_requests_run_concurrently(chat: ChatOpenAI) -> None:
    greece, egypt, streamed = asyncio.run(_many(chat))
    assert "Athens" in greece and "Cairo" in egypt and "Athens" in streamed


def test_logprobs_are_returned_with_the_reply(chat: ChatOpenAI) -> None:
    reply = chat.bind(logprobs=True, top_logprobs=2, max_tokens=5).invoke(QUESTION)
    content = reply.response_metadata["logprobs"]["content"]
    assert len(content) == 5
    for token in content:
        assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["token"] == token["token"], "the most likely token is sampled"
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == reply.content


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_tool_is_called_and_its_result_is_used(chat: ChatOpenAI, choice: str) -> None:
    called = chat.bind_tools([weather, time_in], tool_choice=choice).invoke("How warm is it in Cairo?")
    assert isinstance(called, AIMessage) and called.tool_calls and not called.invalid_tool_calls
    tools = {"weather": weather, "time_in": time_in}
    answers = []
    for call in called.tool_calls:
        assert choice in ("any", call["name"])
        answer = tools[call["name"]].invoke(call)
        assert isinstance(answer, ToolMessage) and answer.tool_call_id == call["id"]
        answers.append(answer)
    assert len({answer.tool_call_id for answer in answers}) == len(answers)
    reply = chat.invoke([HumanMessage("How warm is it in Cairo?"), called, *answers])
    assert reply.content and not reply.tool_calls


def test_the_deltas_of_a_tool_call_add_up(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="weather")
    chunks = list(bound.stream("How warm is it in Cairo?"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert len(pieces) > 1, "arguments are streamed incrementally"
    assert [piece["name"] for piece in pieces] == ["weather"] + [None] * (len(pieces) - 1)
    assert all(piece["id"] for piece in pieces[:1]) and not any(piece["id"] for piece in pieces[1:])
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    (call,) = total.tool_calls
    assert weather.invoke(call["args"]).endswith(("Cairo", "Athens"))
    assert json.loads("".join(piece["args"] or "" for piece in pieces)) == call["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance_of_the_class(chat: ChatOpenAI, method: Any) -> None:
    structured = chat.with_structured_output(Visit, method=method, include_raw=True)
    reply = structured.invoke("Plan a visit to Oslo, by train, for three nights.")
    assert reply["parsing_error"] is None
    assert isinstance(reply["parsed"], Visit)
    *_, last = chat.with_structured_output(Visit, method=method).stream("Plan a visit to Cairo.")
    assert isinstance(last, Visit)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_handwritten_schema_is_followed(chat: ChatOpenAI, method: Any) -> None:
    """The schema says nothing about properties that it does not name."""
    schema = {"title": "Answer", "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    answer = chat.with_structured_output(schema, method=method).invoke("Is Athens in Greece?")
    assert list(answer) == ["yes"] and isinstance(answer["yes"], bool)


def test_json_mode_returns_an_object(chat: ChatOpenAI) -> None:
    short = chat.bind(response_format={"type": "json_object"})
    reply = short.invoke('Answer in JSON, as {"capital": "..."}. ' + QUESTION)
    if reply.response_metadata["finish_reason"] == "stop":  # a model this small may not stop
        assert isinstance(json.loads(str(reply.content)), dict)
    else:
        assert str(reply.content).lstrip().startswith("{")


def test_an_error_has_openai_s_shape(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_k") as error:
        chat.bind(extra_body={"top_k": -7}).invoke(QUESTION)
    assert error.value.body["param"] == "top_k"


# ------------------------------------------------------------------------------------------------------- embeddings


TEXTS = ["The sea is calm.", "The sea is rough.", "Tax returns are due in May."]


@pytest.fixture
def vocabulary(model: str) -> str:
    """The model's vocabulary as a tiktoken encoding, with which this client tokenizes."""
    name = f"{model} of the tests"
    read = json.loads(Path(os.environ["PIPELINE_MODEL_DIR"], "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in read["added_tokens"]}
    byte_of = _bytes_of_letters()
    ranks = {bytes(byte_of[c] for c in one): i for one, i in read["model"]["vocab"].items() if one not in special}
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tiktoken.registry.ENCODINGS[name] = tiktoken.Encoding(
        name, pat_str=words, mergeable_ranks=ranks, special_tokens=special
    )
    tiktoken.model.MODEL_TO_ENCODING[name] = name
    return name


def _bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def close(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, abs=1e-3)


def test_texts_are_embedded(url: str, model: str) -> None:
    embeddings = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(TEXTS)
    assert [len(vector) for vector in vectors] == [576] * 3
    for vector in vectors:
        assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-3)
    assert close(embeddings.embed_query(TEXTS[1]), vectors[1])
    calm, rough, taxes = vectors
    alike, unlike = (sum(a * b for a, b in zip(calm, other, strict=True)) for other in (rough, taxes))
    assert alike > unlike


def test_ids_of_the_model_s_vocabulary_embed_like_the_text(url: str, model: str, vocabulary: str) -> None:
    plain = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    by_ids = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, tiktoken_model_name=vocabulary
    )
    for one, other in zip(by_ids.embed_documents(TEXTS), plain.embed_documents(TEXTS), strict=True):
        assert close(one, other)


def test_ids_of_another_vocabulary_are_rejected_if_out_of_range(url: str, model: str) -> None:
    """The client's default: ids of OpenAI's vocabularies, which are twice as large."""
    name = "larger than the model's"
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"sea": 99_000}
    tiktoken.registry.ENCODINGS[name] = tiktoken.Encoding(
        name, pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={}
    )
    tiktoken.model.MODEL_TO_ENCODING[name] = name
    embeddings = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, tiktoken_model_name=name
    )
    with pytest.raises(openai.BadRequestError, match="99000") as error:
        embeddings.embed_documents(TEXTS)
    assert str(error.value.body["param"]).startswith("input")
