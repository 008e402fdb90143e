"""Prompts for filling in the middle: the model writes the text between a prefix and a suffix. Pure.

A model that was trained for it has three special tokens. The prompt has the prefix first (PSM), as in llama.cpp:

    <prefix token> prefix <suffix token> suffix <middle token>
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.stages.gateway.errors import unsupported


class FillInTokens(NamedTuple):
    """Special tokens of a model. The last two separate files; not all models have them."""

    prefix: str
    suffix: str
    middle: str
    repo: str = ""
    file: str = ""

    def prompt(self, prefix: str, suffix: str) -> str:
        return f"{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"


FAMILIES = (
    FillInTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen
    FillInTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),  # StarCoder 2
    FillInTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


def fill_in_tokens(added: Mapping[str, Any], param: str) -> FillInTokens:
    """The tokens of a model with these added tokens. Raises ApiError, which names `param`, if it has none."""
    if (tokens := find_fill_in_tokens(added)) is None:
        raise unsupported(param, "the model has no fill-in-the-middle tokens")
    return tokens


def find_fill_in_tokens(added: Mapping[str, Any]) -> FillInTokens | None:
    """The tokens of a model with these added tokens; None if it has none."""
    for tokens in FAMILIES:
        if added.keys() >= {tokens.prefix, tokens.suffix, tokens.middle}:
            separators = (name if name in added else "" for name in (tokens.repo, tokens.file))
            return FillInTokens(*tokens[:3], *separators)
    return None
