"""A queue that is fair to the API keys whose work waits in it. Pure.

    push(key, item, scope, cost) ──► scopes ──► size classes of a scope ──► items in order of arrival ──► pop()

It is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels. Every scope gets the same share of
the work, counted in cost, and within a scope every size class does. So:

- A scope that begins to wait has its turn after the work that has begun, and before all others except for at most one
  item of each.
- Within a scope, small items don't wait behind the large ones that came before them.
- Nothing waits for ever: what is pushed later gets a later turn, except for one item of each class of size.

Scopes may be the addresses of many clients, so none of this takes time for each scope.
"""

import heapq
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
    """The items of one scope by class. `start` is the turn of the scope, `now` that of its classes, in cost. Of scopes
    with the same turn, the one with the smallest `number` is first."""

    __slots__ = ("classes", "listed", "now", "num_items", "number", "start")

    def __init__(self, start: int, number: int) -> None:
        self.start = start
        self.number = number
        self.now = 0
        self.listed: tuple[int, int, int] | None = None
        """The last turn that was listed for it, if it has items."""
        self.num_items = 0
        self.classes: dict[int, _SizeClass[K, T]] = {}

    @property
    def next_class(self) -> _SizeClass[K, T]:
        """The class whose turn it is, of a scope that has items."""
        found: _SizeClass[K, T] | None = None
        for one in self.classes.values():  # this is read several times for each item, and mostly there is one
            if one.items and (found is None or (one.start, one.next_cost) < (found.start, found.next_cost)):
                found = one
        assert found is not None, "no item waits"
        return found

    @property
    def turn(self) -> tuple[int, int, int]:
        """Orders the scopes that have items."""
        return self.start, self.next_class.next_cost, self.number


class FairQueue(Generic[K, T]):
    """Items wait here by scope. Each has a key that no other waiting item has."""

    def __init__(self) -> None:
        self._scopes: dict[str, _Scope[K, T]] = {}
        """Also empty ones, whose last item has cost them turns that are not over."""
        self._locations: dict[K, tuple[str, int]] = {}
        """Scope and class of each waiting item."""
        self._idle: dict[str, None] = {}
        """Those without items."""
        self._turns: list[tuple[tuple[int, int, int], str]] = []
        """A heap with the turn of each scope that has items, and with former ones."""
        self._num_scopes = 0
        """That there ever were."""
        self._now = 0

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: object) -> bool:
        return key in self._locations

    def __iter__(self) -> Iterator[K]:
        """The keys, in order of arrival."""
        return iter(self._locations)

    def __getitem__(self, key: K) -> T:
        scope, size = self._locations[key]
        return self._scopes[scope].classes[size].items[key].item

    def push(self, key: K, item: T, scope: str, cost: int) -> None:
        """Add an item. `cost` is about the work that it takes, in any unit that all items share; at least 1 counts."""
        assert key not in self._locations, key
        cost = max(cost, 1)
        size = (cost.bit_length() + 1) // CLASS_BITS
        if (flow := self._scopes.get(scope)) is None:
            flow = self._scopes[scope] = _Scope(self._now, self._num_scopes)
            self._num_scopes += 1
        elif not flow.num_items:
            flow.start, flow.now = max(flow.start, self._now), 0
            flow.classes.clear()
        if (same := flow.classes.get(size)) is None:
            same = flow.classes[size] = _SizeClass(flow.now)
        elif not same.items:
            same.start = max(same.start, flow.now)
        same.items[key] = _Waiting(item, cost)
        self._idle.pop(scope, None)
        flow.num_items += 1
        self._locations[key] = scope, size
        self._list(scope, flow)

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
        del self._locations[key]
        flow.num_items -= 1
        self._now, flow.now = max(self._now, flow.start), same.start
        flow.start += cost
        same.start += cost
        self._list(scope, flow)
        self._forget()
        return key, item, scope

    def _next_scope(self, without: Collection[str]) -> str | None:
        skipped, found = [], None
        while self._turns and found is None:
            turn, scope = self._turns[0]
            flow = self._scopes.get(scope)
            if flow is None or not flow.num_items or flow.turn != turn:
                heapq.heappop(self._turns)  # a former one
            elif scope in without:
                skipped.append(heapq.heappop(self._turns))
            else:
                found = scope
        for one in skipped:
            heapq.heappush(self._turns, one)
        return found

    def _list(self, scope: str, flow: _Scope[K, T]) -> None:
        """The items of a scope, or its turn, have changed."""
        if not flow.num_items:
            flow.listed, self._idle[scope] = None, None
        elif (turn := flow.turn) != flow.listed:
            flow.listed = turn
            heapq.heappush(self._turns, (turn, scope))
            if len(self._turns) > 2 * len(self._scopes) + MAX_REMEMBERED:
                self._turns = [(one.turn, name) for name, one in self._scopes.items() if one.num_items]
                heapq.heapify(self._turns)

    def remove(self, key: K) -> T | None:
        """Take an item out of the queue without a turn; None if it does not wait."""
        if (location := self._locations.pop(key, None)) is None:
            return None
        scope, size = location
        flow = self._scopes[scope]
        flow.num_items -= 1
        item = flow.classes[size].items.pop(key).item
        self._list(scope, flow)
        self._forget()
        return item

    def _forget(self) -> None:
        """Drop empty scopes whose turns are over; if there are many, all empty ones."""
        is_full = len(self._idle) > MAX_REMEMBERED
        for scope in [name for name in self._idle if is_full or self._scopes[name].start <= self._now]:
            del self._scopes[scope], self._idle[scope]
