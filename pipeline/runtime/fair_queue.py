"""A queue that is fair to the API keys whose work waits in it. Pure.

    push(key, item, scope, cost) ──► scopes ──► size classes of a scope ──► items in order of arrival ──► pop()

It is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels. Every scope gets the same share of
the work, counted in cost, and within a scope every size class does. So:

- A scope that begins to wait has its turn after the work that has begun, and before all others except for at most one
  item of each.
- Within a scope, small items don't wait behind the large ones that came before them.
- Nothing waits for ever: what is pushed later gets a later turn, except for one item of each class of size.
"""

from collections.abc import Collection, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

CLASS_BITS = 3
"""Costs that differ by less than 2 ** CLASS_BITS times may be in one class."""


MAX_REMEMBERED = 1024
"""Scopes without items whose last turn is remembered."""


class _Waiting(NamedTuple, Generic[T]):
    item: T
    cost: int


class _SizeClass(Generic[K, T]):
    """Items of similar cost of one scope. `start` is the turn of its first one, in cost."""

    __slots__ = ("items", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.items: dict[K, _Waiting[T]] = {}

    @property
    def next_cost(self) -> int:
        return next(iter(self.items.values())).cost


class _Scope(Generic[K, T]):
    """The items of one scope by class. `start` is the turn of the scope, `now` that of its classes, in cost."""

    __slots__ = ("classes", "now", "num_items", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.now = 0
        self.num_items = 0
        self.classes: dict[int, _SizeClass[K, T]] = {}

    @property
    def next_class(self) -> _SizeClass[K, T]:
        return min((one for one in self.classes.values() if one.items), key=lambda one: (one.start, one.next_cost))


class FairQueue(Generic[K, T]):
    """Items wait here by scope. Each has a key that no other waiting item has."""

    def __init__(self) -> None:
        self._scopes: dict[str, _Scope[K, T]] = {}
        """Also empty ones, whose last item has cost them turns that are not over."""
        self._places: dict[K, tuple[str, int]] = {}
        """Scope and class of each waiting item."""
        self._now = 0
        self._num_busy = 0
        """Scopes with items."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[K]:
        """The keys, in order of arrival."""
        return iter(self._places)

    def __getitem__(self, key: K) -> T:
        scope, size = self._places[key]
        return self._scopes[scope].classes[size].items[key].item

    def push(self, key: K, item: T, scope: str, cost: int) -> None:
        """Add an item. `cost` is about the work that it takes, in any unit that all items share; at least 1 counts."""
        assert key not in self._places, key
        cost = max(cost, 1)
        size = (cost.bit_length() + 1) // CLASS_BITS
        if (flow := self._scopes.get(scope)) is None:
            flow = self._scopes[scope] = _Scope(self._now)
        elif not flow.num_items:
            flow.start, flow.now = max(flow.start, self._now), 0
            flow.classes.clear()
        if (same := flow.classes.get(size)) is None:
            same = flow.classes[size] = _SizeClass(flow.now)
        elif not same.items:
            same.start = max(same.start, flow.now)
        same.items[key] = _Waiting(item, cost)
        self._num_busy += not flow.num_items
        flow.num_items += 1
        self._places[key] = scope, size

    def peek(self, without: Collection[str] = ()) -> tuple[K, T, str] | None:
        """What `pop` would return."""
        if (scope := self._next_scope(without)) is None:
            return None
        key, waiting = next(iter(self._scopes[scope].next_class.items.items()))
        return key, waiting.item, scope

    def pop(self, without: Collection[str] = ()) -> tuple[K, T, str] | None:
        """The item whose turn it is, with its key and scope. None if nothing waits, or only of the scopes
        `without`."""
        if (scope := self._next_scope(without)) is None:
            return None
        flow = self._scopes[scope]
        same = flow.next_class
        key = next(iter(same.items))
        item, cost = same.items.pop(key)
        del self._places[key]
        flow.num_items -= 1
        self._num_busy -= not flow.num_items
        self._now, flow.now = max(self._now, flow.start), same.start
        flow.start += cost
        same.start += cost
        self._forget()
        return key, item, scope

    def _next_scope(self, without: Collection[str]) -> str | None:
        turns = [
            (flow.start, flow.next_class.next_cost, place, scope)
            for place, (scope, flow) in enumerate(self._scopes.items())
            if flow.num_items and scope not in without
        ]
        return min(turns)[-1] if turns else None

    def remove(self, key: K) -> T | None:
        """Take an item out of the queue without a turn; None if it does not wait."""
        if (place := self._places.pop(key, None)) is None:
            return None
        scope, size = place
        flow = self._scopes[scope]
        flow.num_items -= 1
        self._num_busy -= not flow.num_items
        item = flow.classes[size].items.pop(key).item
        self._forget()
        return item

    def _forget(self) -> None:
        """Drop empty scopes whose turns are over; if there are many, all empty ones."""
        if len(self._scopes) == self._num_busy:
            return
        is_full = len(self._scopes) > self._num_busy + MAX_REMEMBERED
        for scope in [
            name for name, flow in self._scopes.items() if not flow.num_items and (is_full or flow.start <= self._now)
        ]:
            del self._scopes[scope]
