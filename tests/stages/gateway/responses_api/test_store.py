"""The store of responses: bounds, scopes, and items by id."""

from typing import Any

import pytest
from msgspec import Raw

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.responses_api.items import InputText, Item, MessageItem, OutputText
from pipeline.stages.gateway.responses_api.store import ResponseStore, StoredResponse
from pipeline.stages.gateway.responses_api.types import ReasoningEcho, ResponseObject

MANY = 2**40


def message(item_id: str, text: str = "a") -> Item:
    return MessageItem(item_id, "user", "completed", [InputText(text)])


def stored(
    response_id: str, *items: Item, scope: str = "", text: str = "b", is_running: bool = False
) -> StoredResponse:
    output: list[Item] = [MessageItem(f"msg_{response_id}", "assistant", "completed", [OutputText(text)])]
    response = ResponseObject(
        id=response_id,
        created_at=0,
        status="completed",
        background=False,
        instructions=None,
        max_output_tokens=None,
        model="tiny",
        output=output,
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning=ReasoningEcho(None, None),
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text=Raw(b"{}"),
        tool_choice=Raw(b'"auto"'),
        tools=Raw(b"[]"),
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
        metadata={},
    )
    request: Any = object() if is_running else None
    return StoredResponse(scope, response, list(items), request)


def has(store: ResponseStore, response_id: str, scope: str = "") -> bool:
    try:
        return store.get(response_id, scope).response.id == response_id
    except ApiError as error:
        assert (error.status, error.code) == (404, "response_not_found")
        return False


def test_the_oldest_go_first_when_there_are_too_many() -> None:
    store = ResponseStore(2, MANY)
    for response_id in "abc":
        store.put(stored(response_id))
    assert [has(store, one) for one in "abc"] == [False, True, True]
    assert len(store) == 2


def test_the_oldest_go_first_when_they_are_too_large() -> None:
    size = ResponseStore(9, MANY)
    size.put(stored("a"))
    store = ResponseStore(9, 2 * size.num_bytes)
    for response_id in "abc":
        store.put(stored(response_id))
    assert [has(store, one) for one in "abc"] == [False, True, True]
    store.put(stored("d", text="x" * 3 * size.num_bytes))
    assert len(store) == 0 and store.num_bytes == 0


def test_the_conversation_counts_too() -> None:
    store = ResponseStore(9, MANY)
    store.put(stored("a"))
    before = store.num_bytes
    store.put(stored("a", message("m", "x" * 1000)))
    assert len(store) == 1
    assert before + 1000 < store.num_bytes < before + 1200


def test_running_responses_stay() -> None:
    store = ResponseStore(1, MANY)
    store.put(stored("a", is_running=True))
    store.put(stored("b"))
    assert [has(store, one) for one in "ab"] == [True, False]
    assert [one.response.id for one in store.running()] == ["a"]
    store.put(stored("a"))
    store.put(stored("b"))
    assert [has(store, one) for one in "ab"] == [False, True]


def test_other_scopes_find_nothing() -> None:
    store = ResponseStore(9, MANY)
    store.put(stored("a", message("m"), scope="x"))
    assert has(store, "a", "x") and not has(store, "a", "y")
    assert store.item("p", "m", "x") == message("m")
    with pytest.raises(ApiError) as refused:
        store.item("p", "m", "y")
    assert (refused.value.param, refused.value.code) == ("p", "item_not_found")


def test_an_item_is_found_while_a_conversation_has_it() -> None:
    store = ResponseStore(9, MANY)
    store.put(stored("a", message("m")))
    store.put(stored("b", message("m")))
    store.delete("b")
    assert store.item("p", "m", "") == message("m")
    assert store.item("p", "msg_a", "").id == "msg_a"
    store.delete("a")
    store.delete("a")
    for item_id in ("m", "msg_a"):
        with pytest.raises(ApiError):
            store.item("p", item_id, "")
    assert store.num_bytes == 0
