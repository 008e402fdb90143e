"""What a request refers to counts before it costs anything: a few bytes may name an item of megabytes many times."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.gateway.apis.responses import messages, parsing, store
from pipeline.stages.gateway.apis.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, response_bytes, sized
from pipeline.stages.gateway.apis.responses.types import MAX_PAGE_BYTES
from tests.stages.gateway.admission.test_open_bytes import FEW_FACTORS, deep_bytes
from tests.stages.gateway.admission.test_preemption import load, until
from tests.stages.gateway.apis.responses.bodies import BODY, PATH, reply
from tests.stages.gateway.apis.responses.test_store import stored
from tests.stages.gateway.gate import COMPLETION, Gate

MAX_OPEN_BYTES = 8 * 1024**2
ITEM_BYTES = 600_000
"""Of the large item: three fit the quarter of MAX_OPEN_BYTES, and ten fit three quarters of it."""
REFERENCE = {"type": "item_reference", "id": "rs_large"}
LARGE = {
    "type": "reasoning",
    "id": "rs_large",
    "content": "x",
    "summary": [{"type": "summary_text", "text": "s" * ITEM_BYTES}],
}
"""A summary beside a content is in no prompt, but it is kept and listed."""

TEXTS = st.text(max_size=40) | st.builds(lambda char, num: char * num, st.sampled_from("aé🦊"), st.integers(2, 5000))
PARTS = st.one_of(*(st.builds(kind, TEXTS) for kind in (OutputText, InputText, Refusal)))
ITEMS: st.SearchStrategy[Item] = st.one_of(
    st.builds(MessageItem, TEXTS, st.sampled_from(["user", "assistant"]), st.just("completed"), st.lists(PARTS)),
    st.builds(FunctionCallItem, TEXTS, TEXTS, TEXTS, TEXTS, st.just("completed")),
    st.builds(FunctionCallOutputItem, TEXTS, TEXTS, TEXTS, st.just("completed")),
    st.builds(
        ReasoningItem,
        TEXTS,
        st.lists(st.builds(SummaryText, TEXTS)),
        st.lists(st.builds(ReasoningText, TEXTS)),
        st.just("completed"),
    ),
)


@given(ITEMS)
def test_the_size_of_an_item_is_what_it_takes(item: Item) -> None:
    found = sized(item)
    size = deep_bytes(item, set())
    assert size <= found.num_bytes <= 8 * size


def test_log_probabilities_count() -> None:
    as_json: Any = [msgspec.Raw(b"x" * 300)] * 10
    plain, more = (
        sized(MessageItem("a", "assistant", "completed", [OutputText("t", logprobs=logprobs)]))
        for logprobs in ([], as_json)
    )
    assert more.num_bytes >= plain.num_bytes + 10 * 300


def test_the_size_of_a_response_is_what_it_takes() -> None:
    response = stored("a").response
    raw = {"text": b"a" * 3000, "tools": b"b" * 2000, "tool_choice": b"c" * 1000}
    response = msgspec.structs.replace(
        response,
        instructions="i" * 4000,
        metadata={"k" * 64: "v" * 512},
        **{name: msgspec.Raw(raw[name]) for name in raw},
    )
    size = deep_bytes(msgspec.structs.replace(response, output=[], text=b"", tools=b"", tool_choice=b""), set())
    assert size + 6000 <= response_bytes(response) <= FEW_FACTORS * (size + 6000)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, max_open_bytes=MAX_OPEN_BYTES) as gate:
        future = gate.post(BODY | {"input": [LARGE, {"role": "user", "content": "Hi"}]}, PATH)
        gate.serve()
        assert future.result().status_code == 200
        yield gate


def refused(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


@pytest.mark.parametrize("more", [{}, {"background": True}, {"store": False}, {"stream": True}])
def test_references_beyond_three_quarters_are_refused(gate: Gate, more: dict[str, Any]) -> None:
    num_fit = MAX_OPEN_BYTES * 3 // 4 // ITEM_BYTES
    response = gate.post(BODY | more | {"input": [REFERENCE] * 250}, PATH).result()
    assert refused(response) == (400, f"input[{num_fit}].id", "request_too_large")
    assert "max_open_bytes" in response.json()["error"]["message"]
    assert gate.rig.nothing("ingest", 0.0)
    assert load(gate)["open_bytes"] == 0


def test_references_are_resolved_only_as_far_as_they_fit(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built of what is refused, and no text is encoded to learn its size."""
    resolved: list[str] = []
    whole = store.ResponseStore.item

    def item(self: store.ResponseStore, *args: Any) -> SizedItem:
        resolved.append(args[0])
        return whole(self, *args)

    monkeypatch.setattr(store.ResponseStore, "item", item)
    monkeypatch.setattr(parsing, "messages_of", None)
    assert gate.post(BODY | {"input": [REFERENCE] * 250}, PATH).result().status_code == 400
    assert len(set(resolved)) <= MAX_OPEN_BYTES // ITEM_BYTES
    assert not hasattr(store, "_encoder")


def test_references_beyond_the_quarter_wait_for_the_others(gate: Gate) -> None:
    """Alone they are served; beside another request they get 503, and the others are served."""
    body = BODY | {"input": [REFERENCE] * 5}
    other = gate.complete(COMPLETION)
    submit = gate.begin()
    response = gate.post(body, PATH).result()
    assert response.status_code == 503 and "Retry-After" in response.headers, response.text
    assert gate.rig.nothing("ingest", 0.0), "it was opened before it was refused"
    beside = gate.complete(COMPLETION)
    gate.serve()
    assert beside.result().status_code == 200
    gate.finish(submit)
    assert other.result().status_code == 200
    until(gate, lambda found: found["open_sequences"] == 0)

    alone = gate.post(body, PATH)
    submit = gate.begin()
    assert load(gate)["open_bytes"] > 5 * ITEM_BYTES
    gate.finish(submit, "Hello")
    assert alone.result().status_code == 200
    until(gate, lambda found: found["open_bytes"] == 0)


def test_a_conversation_of_a_previous_response_counts(gate: Gate) -> None:
    """Each response of a chain repeats the items before it."""
    future = gate.post(BODY | {"input": [REFERENCE] * 6}, PATH)
    gate.serve()
    previous = future.result().json()["id"]
    body = BODY | {"previous_response_id": previous}
    response = gate.post(body | {"input": [REFERENCE] * 10}, PATH).result()
    num_more = MAX_OPEN_BYTES * 3 // 4 // ITEM_BYTES - 6
    assert refused(response) == (400, f"input[{num_more}].id", "request_too_large")
    other = gate.complete(COMPLETION)
    submit = gate.begin()
    assert gate.post(body, PATH).result().status_code == 503
    gate.finish(submit)
    assert other.result().status_code == 200


def test_a_request_takes_no_more_than_the_store_may_have(tmp_path: Path) -> None:
    with Gate(tmp_path, max_stored_response_bytes=ITEM_BYTES) as gate:
        message = {"role": "user", "content": "a" * (ITEM_BYTES // 4), "id": "msg_large"}
        future = gate.post(BODY | {"input": [message]}, PATH)
        gate.serve()
        assert future.result().status_code == 200
        future = gate.post(BODY | {"input": [{"id": "msg_large"}] * 3}, PATH)
        gate.serve()
        assert future.result().status_code == 200
        response = gate.post(BODY | {"input": [{"id": "msg_large"}] * 4}, PATH).result()
        assert refused(response) == (400, "input[3].id", "request_too_large")
        assert "max_stored_response_bytes" in response.json()["error"]["message"]


def test_large_conversations_are_parsed_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    whole = messages.messages_of

    def messages_of(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole(*args)

    with Gate(tmp_path) as gate:
        future = gate.post(BODY | {"input": [LARGE, {"role": "user", "content": "Hi"}]}, PATH)
        gate.serve()
        assert future.result().status_code == 200
        monkeypatch.setattr(parsing, "messages_of", messages_of)
        for given in ("Hi", [REFERENCE]):
            future = gate.post(BODY | {"input": given}, PATH)
            gate.serve()
            assert future.result().status_code == 200
    loop, beside = threads
    assert loop != beside


# ---------------------------------------------------------------------------------------------------- lists of items


def test_a_page_of_items_is_bounded_by_their_size(tmp_path: Path) -> None:
    text = "a" * (MAX_PAGE_BYTES // 3)
    items = [{"role": "user", "content": text, "id": f"msg_{i}"} for i in range(7)]
    items[4]["content"] = text * 4
    with Gate(tmp_path) as gate:
        path = f"{PATH}/{reply(gate, BODY | {'input': items})['id']}/input_items"
        pages, after = [], {}
        while not pages or pages[-1]["has_more"]:
            pages.append(gate.client.get(path, params={"order": "asc", "limit": 100, **after}).json())
            after = {"after": pages[-1]["last_id"]}
            assert len(json.dumps(pages[-1])) < MAX_PAGE_BYTES or len(pages[-1]["data"]) == 1
    found = [[item["id"] for item in page["data"]] for page in pages]
    assert found == [["msg_0", "msg_1"], ["msg_2", "msg_3"], ["msg_4"], ["msg_5", "msg_6"]]
