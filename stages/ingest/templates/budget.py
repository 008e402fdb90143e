"""The budget of a template: steps, and the size of the values that it makes. Pure.

A step is about a microsecond of Python. Reading or writing CHARS_PER_STEP characters of text counts as one step. Steps
are counted, not timed, so that a template ends at the same place on every machine and in every replay. A clock is read
as well, now and then, in case a machine is slower than the count assumes.

    spend ──► left ──used up──► reserve, a slice at a time; here the clock is read ──used up──► OutOfTime
"""

import threading
from collections.abc import Callable
from typing import Any

CHARS_PER_STEP = 32
STEPS_PER_S = 1_000_000
SLICE_STEPS = 2048

MAX_VALUE_CHARS = 2**24
"""The most characters of a text, or of a list that is written out."""

ITEMS_PER_STEP = 8
MAX_ITEMS = 2**20
"""The most items of a list."""

MAX_LEVELS = 256
"""The deepest nesting of lists: more than in any JSON that a client may send."""

MAX_INT_BITS = 4096

SHORT_CHARS = 128
"""Reading a string up to this length is free."""


class OutOfTime(Exception):
    """The steps or the seconds are used up."""


class ValueTooLarge(Exception):
    """A value would exceed a limit; the message is for the client."""


class Budget:
    """The budget of one rendering: a number of steps, and `timeout_s` by `clock` if one is given.

    Each method raises OutOfTime or ValueTooLarge.
    """

    def __init__(self, num_steps: int, timeout_s: float = 0.0, clock: Callable[[], float] | None = None) -> None:
        self._left = 0
        self._reserve = num_steps
        self._clock = clock
        self._end = clock() + timeout_s if clock is not None else 0.0

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            self._take_slice()

    def make(self, num_chars: int) -> None:
        """Call before making a text of this length."""
        if num_chars > MAX_VALUE_CHARS:
            raise ValueTooLarge(f"it makes a text of {num_chars} characters, the limit is {MAX_VALUE_CHARS}")
        self._left -= 1 + num_chars // CHARS_PER_STEP
        if self._left < 0:
            self._take_slice()

    def make_list(self, num_items: int) -> None:
        """Call before making a list of this length."""
        if num_items > MAX_ITEMS:
            raise ValueTooLarge(f"it makes a list of {num_items} items, the limit is {MAX_ITEMS}")
        self.spend(1 + num_items // ITEMS_PER_STEP)

    def read(self, value: Any) -> int:
        """Call before comparing, printing, hashing or searching a value. Returns its `weight`."""
        kind = type(value)
        if kind is str:
            num_chars = len(value)
            if num_chars > SHORT_CHARS:
                self.spend(num_chars // CHARS_PER_STEP)
            return num_chars
        if not isinstance(value, CONTAINERS):
            return 8
        weight = self.weight(value)
        self.spend(weight // CHARS_PER_STEP)
        return weight

    def weight(self, value: Any) -> int:
        """About the length of a value when it is written out. A part that is referenced twice counts twice, but takes
        steps once."""
        return self._weight(value, {}, 0)

    def _weight(self, value: Any, known: dict[int, int], level: int) -> int:
        if isinstance(value, str):
            return len(value) + 2
        if not isinstance(value, CONTAINERS):
            return 8
        if isinstance(value, range):
            return 8 * len(value)
        if (weight := known.get(id(value))) is not None:
            return weight
        if level == MAX_LEVELS:
            raise ValueTooLarge(f"it nests lists {MAX_LEVELS} levels deep")
        self.spend(1 + len(value) // 4)
        weight = 8
        if isinstance(value, PAIRS):
            for key, item in value.items() if isinstance(value, dict) else value:
                weight += self._weight(key, known, level + 1) + self._weight(item, known, level + 1) + 4
        else:
            for item in value:
                weight += self._weight(item, known, level + 1) + 2
        if weight > MAX_VALUE_CHARS:
            raise ValueTooLarge(f"it makes a value of more than {MAX_VALUE_CHARS} characters")
        known[id(value)] = weight
        return weight

    def _take_slice(self) -> None:
        taken = max(-self._left, min(SLICE_STEPS, self._reserve))
        if taken > self._reserve:
            raise OutOfTime
        self._reserve -= taken
        self._left += taken
        if self._clock is not None and self._clock() > self._end:
            raise OutOfTime


_EMPTY: dict[Any, Any] = {}
VIEWS = (type(_EMPTY.items()), type(_EMPTY.keys()), type(_EMPTY.values()))
PAIRS = (dict, VIEWS[0])
CONTAINERS = (list, tuple, dict, range, *VIEWS)
"""Types that write out the values they hold. Namespaces don't, see sandbox.py, so no value can contain itself."""


class _Active(threading.local):
    """The budget of the current rendering in this thread."""

    budget: Budget

    def __init__(self) -> None:
        self.budget = Budget(0)


active = _Active()
