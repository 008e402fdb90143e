"""What a template may cost: steps, and the size of what it makes. Pure.

A step is about a microsecond of Python. Work on text counts as one step for CHARS_PER_STEP characters, whether it reads
or writes them. Steps are counted, not timed, so that what a template does to a chat is the same on every machine and in
every replay; a clock is read besides, now and then, for a machine that is slower than the count takes it for.

    spend ──► left ──used up──► reserve, a slice at a time; here the clock is read ──used up──► OutOfTime
"""

import threading
from collections.abc import Callable
from typing import Any

CHARS_PER_STEP = 32
STEPS_PER_S = 1_000_000
SLICE_STEPS = 2048

MAX_VALUE_CHARS = 2**24
"""No text that a template makes is longer, nor any list when it is written out."""

ITEMS_PER_STEP = 8
MAX_ITEMS = 2**20
"""Of a list."""

MAX_LEVELS = 256
"""Lists in lists, and so on: more than any JSON that a client may send."""

MAX_INT_BITS = 4096

SHORT_CHARS = 128
"""Strings up to here are read for nothing."""


class OutOfTime(Exception):
    """The steps or the seconds are used up."""


class TooLarge(Exception):
    """A value would be larger than a template may make; the words are for the client."""


class Budget:
    """What one rendering may use: so many steps, and no longer than `timeout_s` by `clock` where one is given.

    Raises OutOfTime or TooLarge in each of its methods.
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
        """To be said before a text of this length is made."""
        if num_chars > MAX_VALUE_CHARS:
            raise TooLarge(f"it makes a text of {num_chars} characters, and {MAX_VALUE_CHARS} are the most")
        self._left -= 1 + num_chars // CHARS_PER_STEP
        if self._left < 0:
            self._take_slice()

    def make_list(self, num_items: int) -> None:
        """Likewise before a list of so many is made."""
        if num_items > MAX_ITEMS:
            raise TooLarge(f"it makes a list of {num_items}, and {MAX_ITEMS} are the most")
        self.spend(1 + num_items // ITEMS_PER_STEP)

    def read(self, value: Any) -> int:
        """To be said before a value is compared, printed, hashed or searched. Returns its `weight`."""
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
        """How long a value is when it is written out, about: what is held twice counts twice. Takes steps for what it
        looks at, which is what is held twice only once. Raises TooLarge where that is too much for any use."""
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
            raise TooLarge(f"it puts lists into lists, {MAX_LEVELS} levels deep")
        self.spend(1 + len(value) // 4)
        weight = 8
        if isinstance(value, PAIRS):
            for key, item in value.items() if isinstance(value, dict) else value:
                weight += self._weight(key, known, level + 1) + self._weight(item, known, level + 1) + 4
        else:
            for item in value:
                weight += self._weight(item, known, level + 1) + 2
        if weight > MAX_VALUE_CHARS:
            raise TooLarge(f"it makes lists that hold more than {MAX_VALUE_CHARS}")
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
"""What holds values and writes them out. Namespaces do not, see sandbox.py, so nothing can hold itself."""


class _Active(threading.local):
    """The budget of the rendering that this thread is at."""

    budget: Budget

    def __init__(self) -> None:
        self.budget = Budget(0)


active = _Active()
