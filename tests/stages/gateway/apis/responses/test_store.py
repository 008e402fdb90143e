"""The store of responses: bounds, scopes, and items by id."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from pipeline.stages.gateway.apis.responses.items import InputText, Item, MessageItem, OutputText
from pipeline.stages.gateway.apis.responses.sizes import sized
from pipeline.stages.gateway.apis.responses.store import ResponseStore, StoredResponse
from pipeline.stages.gateway.apis.responses.types import ReasoningEcho, ResponseObject
from pipeline.stages.gateway.errors import ApiError

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
    return StoredResponse(scope, response, [*map(sized, items)], request)


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
    assert before + 1000 < store.num_bytes < before + 2000


def test_running_responses_stay() -> None:
    store = ResponseStore(1, MANY)
    store.put(stored("a", is_running=True))
    store.put(stored("b"))
    assert [has(store, one) for one in "ab"] == [True, True], "admission counts what runs"
    assert [one.response.id for one in store.running()] == ["a"]
    before = store.num_bytes
    store.put(stored("c", is_running=True, text="x" * 1000))
    assert store.num_bytes == before
    store.delete("c")
    store.put(stored("a"))
    assert [has(store, one) for one in "ab"] == [True, False]
    store.put(stored("b"))
    assert [has(store, one) for one in "ab"] == [False, True]


@pytest.mark.parametrize("by_bytes", [False, True])
def test_a_scope_that_stores_much_evicts_its_own(by_bytes: bool) -> None:
    """Two responses of one key stay whatever the other stores; what is free is for the next that comes."""
    size = ResponseStore(9, MANY)
    size.put(stored("a00", scope="x"))
    store = ResponseStore(MANY, 6 * size.num_bytes) if by_bytes else ResponseStore(6, MANY)
    for number in range(2):
        store.put(stored(f"a{number:02}", scope="x"))
    for number in range(50):
        store.put(stored(f"b{number:02}", scope="y"))
    assert [has(store, f"a{number:02}", "x") for number in range(2)] == [True, True]
    assert [number for number in range(50) if has(store, f"b{number:02}", "y")] == [46, 47, 48, 49]
    for number in range(2, 50):
        store.put(stored(f"a{number:02}", scope="x"))
    assert [number for number in range(50) if has(store, f"a{number:02}", "x")] == [47, 48, 49]
    assert [number for number in range(50) if has(store, f"b{number:02}", "y")] == [47, 48, 49]


@given(st.lists(st.tuples(st.sampled_from("pdr"), st.sampled_from("xyz"), st.integers(0, 9), st.integers(0, 900))))
def test_the_store_counts_what_it_has(steps: list[tuple[str, str, int, int]]) -> None:
    store = ResponseStore(7, 9000)
    ids = set()
    for kind, scope, number, num_chars in steps:
        response_id = f"{scope}{number}"
        ids.add((response_id, scope))
        if kind == "d":
            store.delete(response_id)
        else:
            store.put(
                stored(response_id, message(f"m{number}"), scope=scope, text="t" * num_chars, is_running=kind == "r")
            )
        complete = [found for found in (store.get(*one) for one in ids if has(store, *one)) if not found.is_running]
        assert store.num_bytes == sum(one.num_bytes for one in complete) <= 9000
        assert len(complete) <= 7
    for response_id, _ in ids:
        store.delete(response_id)
    assert store.num_bytes == 0 and len(store) == 0


def test_other_scopes_find_nothing() -> None:
    store = ResponseStore(9, MANY)
    store.put(stored("a", message("m"), scope="x"))
    assert has(store, "a", "x") and not has(store, "a", "y")
    assert store.item("p", "m", "x").item == message("m")
    with pytest.raises(ApiError) as refused:
        store.item("p", "m", "y")
    assert (refused.value.param, refused.value.code) == ("p", "item_not_found")


def test_an_item_is_found_while_a_conversation_has_it() -> None:
    store = ResponseStore(9, MANY)
    store.put(stored("a", message("m")))
    store.put(stored("b", message("m")))
    store.delete("b")
    assert store.item("p", "m", "").item == message("m")
    assert store.item("p", "msg_a", "").item.id == "msg_a"
    store.delete("a")
    store.delete("a")
    for item_id in ("m", "msg_a"):
        with pytest.raises(ApiError):
            store.item("p", item_id, "")
    assert store.num_bytes == 0


def test_storing_and_dropping_a_long_conversation_calls_nothing_for_each_item() -> None:
    """It may have as many items as the model takes tokens, and the loop of the gateway waits."""

    def num_calls(num_items: int) -> int:
        items = [MessageItem(f"msg_{index}", "user", "completed", [OutputText("a")]) for index in range(num_items)]
        store = ResponseStore(10, 10**9)
        one = stored("resp_1", *items)
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            store.put(one)
            store.delete("resp_1")
        finally:
            sys.setprofile(None)
        assert not len(store)
        return calls

    assert num_calls(2000) == num_calls(20)
