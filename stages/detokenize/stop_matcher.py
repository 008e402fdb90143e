"""Judges where a text ends because of a stop string.

The rule: the match that is complete first wins; of those complete at the same character, the longest. So the verdict
depends on the text alone and not on how it was cut into pieces.

Each character is looked at once, with the automaton of A. Aho and M. Corasick, "Efficient string matching: an aid to
bibliographic search" (1975): a node is the longest beginning of a stop string that the text ends with, and its depth
is how much of the text can't be shown yet.
"""

from collections import deque
from collections.abc import Iterable

ROOT = 0


class StopStrings:
    """The automaton of a set of stop strings; empty ones never match. The same for all sequences that share the set.

    A node's entry in each list: `depth` is its distance from the root, `ends` the longest stop string that a text at
    this node ends with.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]
        self.depth = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            if stop:
                self._plant(stop)
        self._link()
        self.firsts = frozenset(self._children[ROOT])
        """The characters that stop strings begin with."""

    def next(self, node: int, character: str) -> int:
        """The node after one more character of text."""
        while (child := self._children[node].get(character)) is None:
            if node == ROOT:
                return ROOT
            node = self._fallback[node]
        return child

    def _plant(self, stop: str) -> None:
        node = ROOT
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._fallback.append(ROOT)
                self.depth.append(self.depth[node] + 1)
                self.ends.append(None)
            node = child
        self.ends[node] = stop

    def _link(self) -> None:
        """Give each node, in order of depth, the longest proper ending of it that is a node as well."""
        nodes = deque(self._children[ROOT].values())
        while nodes:
            node = nodes.popleft()
            for character, child in self._children[node].items():
                self._fallback[child] = self.next(self._fallback[node], character)
                nodes.append(child)
            if self.ends[node] is None:
                self.ends[node] = self.ends[self._fallback[node]]


class StopMatcher:
    """Lets one sequence's text through up to the first stop string."""

    __slots__ = ("_held", "_include_stop", "_node", "_stops", "found")

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = ROOT
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, counts: bool = True) -> str:
        """What can be shown after `text` has come. Nothing may be pushed once `found` is set. Stop strings that end in
        a text that does not count go unnoticed."""
        node, stops = self._node, self._stops
        if node == ROOT and stops.firsts.isdisjoint(text):
            return text
        for place, character in enumerate(text, 1):
            node = stops.next(node, character)
            if counts and (stop := stops.ends[node]) is not None:
                self.found = stop
                shown = self._held + text[:place]
                return shown if self._include_stop else shown[: -len(stop)]
        self._node = node
        if self._include_stop:
            return text
        shown = self._held + text
        split = len(shown) - stops.depth[node]
        self._held = shown[split:]
        return shown[:split]

    def finish(self) -> str:
        """What was held back; no text follows, and no stop string was found."""
        return self._held
