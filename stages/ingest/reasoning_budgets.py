"""The limits of reasoning that chats ask for, or that the server sets."""

import msgspec
from tokenizers import Tokenizer

from pipeline.config.settings import ChatSettings
from pipeline.runtime.messages import ChatPrompt, GenerationOptions, Prompt
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning_budget import budget_of

ANCHOR = "a"
"""Stands before a text that is encoded: tokenizers may write a space at the start of all text."""
NO_LIMIT = 2**31 - 1


class ReasoningBudgets:
    """Those of a model. Its methods run in any thread."""

    def __init__(self, tokenizer: Tokenizer, formats: ChatFormats, settings: ChatSettings) -> None:
        self._tokenizer, self._formats, self._settings = tokenizer, formats, settings

    def num_tokens(self, options: GenerationOptions) -> int:
        """The most tokens of reasoning in a reply; -1: there is no limit, and it is not ended. Beam searches follow
        the model's own distribution."""
        if options.use_beam_search:
            return -1
        asked = options.thinking_token_budget
        num_tokens = self._settings.reasoning_budget if asked is None else asked
        return NO_LIMIT if num_tokens < 0 and options.reasoning_control else num_tokens

    def complete(self, options: GenerationOptions, prompt: Prompt, tail: str | None) -> GenerationOptions:
        """The options with the budget that execute enforces. `tail` is as in `Accepted`."""
        num_tokens = self.num_tokens(options)
        if tail is None or self._formats.reasoning is None or num_tokens < 0:
            return options
        message = options.reasoning_budget_message
        budget = budget_of(
            self._formats,
            self._formats.reasoning.stage_of(tail),
            num_tokens,
            self._settings.reasoning_budget_message if message is None else message,
            self._encode,
            has_tools=isinstance(prompt, ChatPrompt) and bool(prompt.tools) and prompt.tool_choice != "none",
        )
        return msgspec.structs.replace(options, reasoning_budget=budget)

    def _encode(self, text: str) -> list[int]:
        texts = [ANCHOR, ANCHOR + text, text]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        anchor, whole, alone = (list(each.ids) for each in encodings)
        return whole[len(anchor) :] if whole[: len(anchor)] == anchor else alone
