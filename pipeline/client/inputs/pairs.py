"""Pairs of texts for `score`, and the names of prompts in its errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.client.client import ServerInfo
from pipeline.client.inputs.prompts import CheckedPrompt, is_one_prompt, prompt_of
from pipeline.errors import PromptError


class TextPair(NamedTuple):
    """Two texts for a cross-encoder."""

    first: str
    second: str

    @classmethod
    def all_of(cls, first: list[Any], second: list[Any]) -> "list[TextPair]":
        """The pairs of one text with each of the others, or of two lists. Raises PromptError if one is no text."""
        for name, texts in (("data_1", first), ("data_2", second)):
            if (wrong := next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
                raise PromptError(f"{name}[{wrong}] must be a text, not {type(texts[wrong]).__name__}")
        firsts = first if len(first) > 1 else first * len(second)
        return [cls(*texts) for texts in zip(firsts, second, strict=True)]

    def checked(self, name: str, info: ServerInfo) -> CheckedPrompt:
        """The pair as it is sent. Raises PromptError."""
        prompt = prompt_of(self.first, name, info)
        return prompt._replace(prompt={**prompt.prompt, "pair": self.second})


@dataclass(frozen=True, slots=True)
class PromptNames:
    """The names of prompts in error messages."""

    word: str
    is_one: bool

    def of(self, index: int) -> str:
        return self.word if self.is_one else f"{self.word}[{index}]"


@dataclass(frozen=True, slots=True)
class PairNames(PromptNames):
    """The names of the texts of `score`."""

    num_first: int

    def of(self, index: int) -> str:
        return f"data_1[{index}]" if index < self.num_first else f"data_2[{index - self.num_first}]"


def texts_of_score(data_1: Any, data_2: Any) -> tuple[list[Any], list[Any]]:
    """The texts of both arguments of `score`. Raises PromptError."""
    first, second = _several(data_1), _several(data_2)
    if len(first) != 1 and len(first) != len(second):
        raise PromptError(
            f"data_1 has {len(first)} texts and data_2 has {len(second)}: give one text as data_1, or as many"
        )
    if not first or not second:
        raise PromptError("data_1 and data_2 must have at least one text each")
    return first, second


def _several(data: Any) -> list[Any]:
    """The texts of one argument of `score`. Raises PromptError."""
    if is_one_prompt(data):
        return [data]
    if not isinstance(data, Sequence):
        raise PromptError(f"data_1 and data_2 must be a text or a list of texts, not {type(data).__name__}")
    return list(data)
