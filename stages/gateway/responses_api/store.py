"""The stored responses of one gateway, in memory.

The store is bounded by the number of responses and by their bytes: the oldest go first. Background responses that are
not finished stay, since admission bounds these. Clients see only responses of their own scope.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from http import HTTPStatus

import msgspec

from pipeline.stages.gateway.errors import ApiError, invalid, shown
from pipeline.stages.gateway.request import Request
from pipeline.stages.gateway.responses_api.event_log import EventLog
from pipeline.stages.gateway.responses_api.items import Item
from pipeline.stages.gateway.responses_api.types import ResponseObject

_encoder = msgspec.json.Encoder()


class StoredResponse(msgspec.Struct, eq=False):
    """A response and the conversation that led to it."""

    scope: str
    """Of the client's API key"""
    response: ResponseObject
    items: list[Item]
    """The conversation before the output."""
    request: Request | None = None
    """The open request of a background response."""
    events: EventLog | None = None
    """Of a background response that is streamed."""
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.request is not None

    @property
    def conversation(self) -> list[Item]:
        return [*self.items, *self.response.output]


class ResponseStore:
    """Stored responses by id. Large responses are put from a thread, so every access holds a lock."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Size of all responses, their conversations as JSON, and their events but the last. Items that several
        conversations share count for each."""
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], tuple[int, Item]] = {}
        """Items by scope and id, with the number of conversations that have them."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or replace the one with its id, and drop the oldest ones that are too many."""
        with self._lock:
            self._remove(stored.response.id)
            stored.num_bytes = sum(len(_encoder.encode(one)) for one in (stored.response, stored.items))
            if stored.events is not None:
                stored.num_bytes += stored.events.num_bytes
            self._responses[stored.response.id] = stored
            self.num_bytes += stored.num_bytes
            for item in stored.conversation:
                num, _ = self._items.get(key := (stored.scope, item.id), (0, item))
                self._items[key] = num + 1, item
            for response_id in list(self._oldest()):
                self._remove(response_id)

    def get(self, response_id: str, scope: str) -> StoredResponse:
        """Raises ApiError, 404."""
        with self._lock:
            found = self._responses.get(response_id)
        if found is None or found.scope != scope:
            message = f"Response with id '{shown(response_id)}' not found."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "response_id", code="response_not_found")
        return found

    def item(self, param: str, item_id: str, scope: str) -> Item:
        """An item of a stored response. Raises ApiError; `param` is the field that names the item."""
        with self._lock:
            found = self._items.get((scope, item_id))
        if found is None:
            raise invalid(param, f"'{param}': no stored response has an item '{shown(item_id)}'", "item_not_found")
        return found[1]

    def delete(self, response_id: str) -> None:
        """Does nothing if it is not there."""
        with self._lock:
            self._remove(response_id)

    def running(self) -> list[StoredResponse]:
        """Background responses that are not finished."""
        with self._lock:
            return [one for one in self._responses.values() if one.is_running]

    def _oldest(self) -> Iterator[str]:
        """Ids of the responses to drop."""
        num_left, num_bytes = len(self._responses), self.num_bytes
        for response_id, one in self._responses.items():
            if num_left <= self._max_responses and num_bytes <= self._max_bytes:
                return
            if not one.is_running:
                num_left, num_bytes = num_left - 1, num_bytes - one.num_bytes
                yield response_id

    def _remove(self, response_id: str) -> None:
        if (stored := self._responses.pop(response_id, None)) is None:
            return
        self.num_bytes -= stored.num_bytes
        for item in stored.conversation:
            num, kept = self._items[key := (stored.scope, item.id)]
            if num > 1:
                self._items[key] = num - 1, kept
            else:
                del self._items[key]
