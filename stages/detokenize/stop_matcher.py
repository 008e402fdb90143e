"""Finds the stop string that ends a text.

The match that is complete first wins; of those complete at the same character, the longest. So the result depends on
the text alone and not on how it was divided into pieces.

Each character is read once, with the automaton of A. Aho and M. Corasick, "Efficient string matching: an aid to
bibliographic search" (1975): a node is the longest prefix of a stop string that the text ends with, and its depth is
the number of characters that must be held back.
"""

from collections import deque
from collections.abc import Iterable

ROOT = 0


class StopStrings:
    """The automaton of a set of stop strings; empty strings never match. Sequences with the same set share it.

    By node: `depth` is its distance from the root, `ends` the longest stop string that a text at the node ends with.
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
        """Link each node, in order of depth, to its longest proper suffix that is a node."""
        nodes = deque(self._children[ROOT].values())
        while nodes:
            node = nodes.popleft()
            for character, child in self._children[node].items():
                self._fallback[child] = self.next(self._fallback[node], character)
                nodes.append(child)
            if self.ends[node] is None:
                self.ends[node] = self.ends[self._fallback[node]]


class StopMatcher:
    """Passes one sequence's text through up to the first stop string."""

    __slots__ = ("_held", "_include_stop", "_node", "_stops", "found")

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = ROOT
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def push(self, text: str, *, counts: bool = True) -> str:
        """Add text, and return the text that can be shown. Do not push after `found` is set. If not `counts`, stop
        strings that end in this text are ignored."""
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
        """Return the text that was held back. Call it at the end of a text without a stop string."""
        return self._held
