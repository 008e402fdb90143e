"""Prompts of real tasks, for what depends on the text: speculative decoding, structured output.

    extract    copies lines out of a list              nearly everything was in the prompt
    edit       returns a file with small changes       much of it was
    code       writes a function                       some of it repeats
    chat       answers a question                      little was there before

Each prompt differs by its seed, so that no prefix cache has it.
"""

import random
from collections.abc import Callable
from typing import Literal

TaskName = Literal["extract", "edit", "code", "chat"]

_NAMES = ("Ada", "Björn", "Chiara", "Dmitri", "Emeka", "Farida", "Greta", "Hiro", "Ines", "Jonas", "Kalina", "Luis")
_SURNAMES = ("Okafor", "Lindqvist", "Moreau", "Tanaka", "Novak", "Haddad", "Weber", "Silva", "Kowalski", "Iyer")
_CITIES = ("Lund", "Graz", "Porto", "Gdansk")
_GOODS = ("espresso machine", "floor lamp", "bicycle pump", "wool blanket", "chess clock", "garden hose", "tea kettle")

_FILE = '''class {name}:
    """Keeps the {things} of one {owner}."""

    def __init__(self, owner: str, limit: int = {limit}) -> None:
        self.owner = owner
        self.limit = limit
        self.{things}: dict[str, int] = {{}}

    def add(self, key: str, amount: int) -> int:
        """Add an amount and return the new total of this key."""
        if amount <= 0:
            raise ValueError(f"amount must be positive, got {{amount}}")
        total = self.{things}.get(key, 0) + amount
        if total > self.limit:
            raise OverflowError(f"{{key}} would exceed {{self.limit}}")
        self.{things}[key] = total
        return total

    def remove(self, key: str, amount: int) -> int:
        """Remove an amount and return what is left of this key."""
        total = self.{things}.get(key, 0) - amount
        if total < 0:
            raise ValueError(f"{{key}} has fewer than {{amount}}")
        self.{things}[key] = total
        return total

    def largest(self) -> str:
        """The key with the largest total."""
        return max(self.{things}, key=lambda key: self.{things}[key])
'''

_FUNCTIONS = (
    "parses an ISO 8601 duration such as P3DT4H and returns seconds",
    "merges overlapping intervals in a list of (start, end) pairs",
    "finds the longest common subsequence of two strings",
    "evaluates an arithmetic expression with + - * / and parentheses",
    "formats a number of bytes with binary units",
    "solves a sudoku given as a list of nine strings",
)

_QUESTIONS = (
    "Why is the sky blue at noon and red at sunset?",
    "What should I pack for a week of hiking in Norway in September?",
    "Explain to a ten-year-old how vaccines work.",
    "What are good ways to learn to cook if I live alone?",
    "How did the printing press change Europe?",
    "Give me some advice for my first marathon.",
)


def _extract(rng: random.Random) -> str:
    lines = []
    for _ in range(24):
        name = f"{rng.choice(_NAMES)} {rng.choice(_SURNAMES)}"
        lines.append(
            f"order {rng.randint(10_000, 99_999)}: {name}, {rng.randint(1, 9)} x {rng.choice(_GOODS)}, "
            f"{rng.randint(5, 400)}.{rng.randint(10, 99)} EUR, shipped to {rng.choice(_CITIES)}"
        )
    wanted = " or ".join(rng.sample(_CITIES, 2))
    listed = "\n".join(lines)
    return f"Copy all orders that were shipped to {wanted}, one a line, exactly as they are written.\n\n{listed}"


def _edit(rng: random.Random) -> str:
    things, owner = rng.choice(("items", "parts", "books", "tickets")), rng.choice(("shop", "customer", "team"))
    file = _FILE.format(
        name=rng.choice(("Stock", "Ledger", "Inventory", "Account")), things=things, owner=owner,
        limit=rng.randint(100, 9999),
    )  # fmt: skip
    change = rng.choice(("Rename the variable `total` to `balance`", "Rename the method `remove` to `take_out`"))
    return f"{change} in this file. Return the whole file and nothing else.\n\n```python\n{file}```"


def _code(rng: random.Random) -> str:
    number = rng.randint(2, 9)
    return f"Write a Python function that {rng.choice(_FUNCTIONS)}, with a docstring and {number} assertions."


def _chat(rng: random.Random) -> str:
    return f"{rng.choice(_QUESTIONS)} Answer in about {rng.randint(120, 180)} words."


TASKS: dict[TaskName, Callable[[random.Random], str]] = {
    "extract": _extract,
    "edit": _edit,
    "code": _code,
    "chat": _chat,
}


def prompt_of(task: TaskName, seed: int | str) -> str:
    """A user's message; the same for the same seed."""
    return TASKS[task](random.Random(f"{task} {seed}"))
