"""The stored responses of one gateway, in memory.

The store is bounded by the number of responses and by their bytes. If it is full, the scope that has the most loses its
oldest response: a client evicts what others have stored only while these have more than it has itself. Background
responses that are not finished stay and count for nothing here: they are open requests, which admission bounds. Clients
see only responses of their own scope.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from pipeline.stages.gateway.apis.responses.event_log import EventLog
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, parts_of, response_bytes, sized, sum_of
from pipeline.stages.gateway.apis.responses.types import ResponseObject
from pipeline.stages.gateway.errors import ApiError, invalid, shown
from pipeline.stages.gateway.open_requests.request import Request


class StoredResponse(msgspec.Struct, eq=False):
    """A response and the conversation that led to it."""

    scope: str
    """Of the client's API key"""
    response: ResponseObject
    items: list[SizedItem]
    """The conversation before the output."""
    request: Request | None = None
    """The open request of a background response."""
    events: EventLog | None = None
    """Of a background response that is streamed."""
    output: list[SizedItem] = []
    """Of `response`."""
    num_bytes: int = 0
    """What the store counts for it."""
    conversation_bytes: int = 0
    """Of the conversation with its output."""
    num_parts: int = 0
    """Of the conversation with its output, as `items.num_parts`."""

    def __post_init__(self) -> None:
        self.output = [*map(sized, self.response.output)]

    def count(self) -> None:
        """Set `num_bytes`, `conversation_bytes` and `num_parts`."""
        self.conversation_bytes = sum_of(self.items) + sum_of(self.output)
        self.num_parts = parts_of(self.items) + parts_of(self.output)
        self.num_bytes = response_bytes(self.response) + self.conversation_bytes
        if self.events is not None:
            self.num_bytes += self.events.num_bytes

    @property
    def is_running(self) -> bool:
        return self.request is not None

    @property
    def conversation(self) -> list[SizedItem]:
        return [*self.items, *self.output]


class ScopeResponses:
    """What one scope has stored, without responses that are running."""

    def __init__(self) -> None:
        self.ids: OrderedDict[str, None] = OrderedDict()
        """The oldest first."""
        self.num_bytes = 0


class ScopeItems:
    """The items of one scope's conversations by id. A conversation may have as many items as the model takes tokens,
    and the loop waits: nothing is called for each."""

    def __init__(self) -> None:
        self._items: dict[str, SizedItem] = {}
        self._num: Counter[str] = Counter()
        """How often conversations have them."""

    def __len__(self) -> int:
        return len(self._items)

    def get(self, item_id: str) -> SizedItem | None:
        return self._items.get(item_id)

    def add(self, conversation: list[SizedItem]) -> None:
        ids = [one.item.id for one in conversation]
        self._num.update(ids)
        self._items.update(zip(ids, conversation, strict=True))

    def remove(self, conversation: list[SizedItem]) -> None:
        """They were added before."""
        num, items = self._num, self._items
        for item_id in [one.item.id for one in conversation]:
            if (left := num[item_id] - 1) > 0:
                num[item_id] = left
            else:
                num.pop(item_id)  # Counter has a `del` of its own, which is slow
                del items[item_id]


class ResponseStore:
    """Stored responses by id. Large responses are put from a thread, so every access holds a lock."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Size of all complete responses, their conversations, and their events but the last. Items that several
        conversations share, or one has several times, count each time."""
        self._num_complete = 0
        self._responses: dict[str, StoredResponse] = {}
        self._scopes: dict[str, ScopeResponses] = {}
        """By scope: those that have a complete response."""
        self._items: dict[str, ScopeItems] = {}
        """By scope: those that have a response."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or replace the one with its id, and drop those that are too many."""
        with self._lock:
            self._remove(stored.response.id)
            if not stored.is_running:
                stored.count()
                self._add(stored)
            self._responses[stored.response.id] = stored
            self._items.setdefault(stored.scope, ScopeItems()).add(stored.conversation)
            while self._num_complete > self._max_responses:
                self._evict(lambda one: len(one.ids))
            while self.num_bytes > self.max_bytes:
                self._evict(lambda one: one.num_bytes)

    def has(self, response_id: str) -> bool:
        """Whether there is a response of this id, in whichever scope."""
        with self._lock:
            return response_id in self._responses

    def get(self, response_id: str, scope: str) -> StoredResponse:
        """Raises ApiError, 404."""
        with self._lock:
            found = self._responses.get(response_id)
        if found is None or found.scope != scope:
            message = f"Response with id '{shown(response_id)}' not found."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "response_id", code="response_not_found")
        return found

    def item(self, param: str, item_id: str, scope: str) -> SizedItem:
        """An item of a stored response. Raises ApiError; `param` is the field that names the item."""
        with self._lock:
            found = self._items[scope].get(item_id) if scope in self._items else None
        if found is None:
            raise invalid(param, f"'{param}': no stored response has an item '{shown(item_id)}'", "item_not_found")
        return found

    def delete(self, response_id: str) -> None:
        """Does nothing if it is not there."""
        with self._lock:
            self._remove(response_id)

    def running(self) -> list[StoredResponse]:
        """Background responses that are not finished."""
        with self._lock:
            return [one for one in self._responses.values() if one.is_running]

    def _add(self, stored: StoredResponse) -> None:
        scope = self._scopes.setdefault(stored.scope, ScopeResponses())
        scope.ids[stored.response.id] = None
        scope.num_bytes += stored.num_bytes
        self.num_bytes += stored.num_bytes
        self._num_complete += 1

    def _evict(self, size: Callable[[ScopeResponses], int]) -> None:
        """Drop the oldest response of the scope that has the most."""
        self._remove(next(iter(max(self._scopes.values(), key=size).ids)))

    def _remove(self, response_id: str) -> None:
        if (stored := self._responses.pop(response_id, None)) is None:
            return
        scope = self._scopes.get(stored.scope)
        if scope is not None and response_id in scope.ids:
            del scope.ids[response_id]
            scope.num_bytes -= stored.num_bytes
            self.num_bytes -= stored.num_bytes
            self._num_complete -= 1
            if not scope.ids:
                del self._scopes[stored.scope]
        items = self._items[stored.scope]
        items.remove(stored.conversation)
        if not items:
            del self._items[stored.scope]
