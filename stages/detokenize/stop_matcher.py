"""Finds the stop string that ends a text.

The match that is complete first wins; of those complete at the same character, the longest. So the result depends on
the text alone and not on how it was divided into pieces.

Each character is read once, with the automaton of A. Aho and M. Corasick, "Efficient string matching: an aid to
bibliographic search" (1975): a node is the longest prefix of a stop string that the text ends with, and its depth is
the number of characters that must be held back.
"""

from collections.abc import Iterable

ROOT = 0


class StopStrings:
    """The automaton of a set of stop strings; empty strings never match. Sequences with the same set share it.

    It is built as deep as texts have matched so far, one level with a character at most: long strings take a while, and
    requests of which each has others may come by hundreds.

    By node: `depth` is its distance from the root, `ends` the longest stop string that a text at the node ends with.
    Nodes are numbered in order of depth.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        strings = list(dict.fromkeys(filter(None, stops)))
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]
        self.depth = [0]
        self.ends: list[str | None] = [None]
        self._leaves: list[list[str]] = [strings]
        """The stop strings that go on behind each of the last nodes, which have no children yet."""
        self._first_leaf = ROOT
        self.firsts = frozenset(stop[0] for stop in strings)
        """The characters that stop strings begin with."""

    @property
    def num_nodes(self) -> int:
        return len(self.depth)

    def next(self, node: int, character: str) -> int:
        """The node after one more character of text."""
        if node >= self._first_leaf:
            self._grow()
        return self._next(node, character)

    def _next(self, node: int, character: str) -> int:
        while (child := self._children[node].get(character)) is None:
            if node == ROOT:
                return ROOT
            node = self._fallback[node]
        return child

    def _grow(self) -> None:
        """Add the children of the deepest nodes."""
        leaves, index = self._leaves, self._first_leaf
        self._leaves, self._first_leaf = [], len(self.depth)
        for node, strings in enumerate(leaves, index):
            depth = self.depth[node]
            for stop in strings:
                if (child := self._children[node].get(stop[depth])) is None:
                    child = self._plant(node, stop[depth])
                if len(stop) == depth + 1:
                    self.ends[child] = stop
                else:
                    self._leaves[child - self._first_leaf].append(stop)

    def _plant(self, parent: int, character: str) -> int:
        """Add a node. Its fallback is the longest proper suffix that is a node."""
        fallback = ROOT if parent == ROOT else self._next(self._fallback[parent], character)
        node = len(self.depth)
        self._children[parent][character] = node
        self._children.append({})
        self._fallback.append(fallback)
        self.depth.append(self.depth[parent] + 1)
        self.ends.append(self.ends[fallback])
        self._leaves.append([])
        return node


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
        for index, character in enumerate(text, 1):
            node = stops.next(node, character)
            if counts and (stop := stops.ends[node]) is not None:
                self.found = stop
                shown = self._held + text[:index]
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
