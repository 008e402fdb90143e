"""Checks of prompts that need the model's sizes: their ids, and how long they are."""

from collections.abc import Sequence

import numpy as np

from pipeline.runtime.messages import (
    MAX_SHOWN_IDS,
    ChatPrompt,
    Failure,
    IdsPrompt,
    Prompt,
    PromptOptions,
    TextPrompt,
)
from pipeline.stages.ingest.prompts.ids import Ids
from pipeline.stages.ingest.prompts.rejection import RequestRejected, param_of, rejection


class PromptChecks:
    """Those of one model."""

    def __init__(
        self,
        max_model_len: int,
        vocab_size: int,
        max_id_bytes: int | None,
        max_prompt_bytes: int,
        *,
        generates: bool = True,
    ) -> None:
        """`max_id_bytes` is `longest_id_bytes` of the tokenizer. `generates`: the model samples an id after every
        prompt, those of embeddings too."""
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_id_bytes = max_id_bytes
        self._max_prompt_bytes = max_prompt_bytes
        self.most_pooled = max_model_len - generates
        """The most ids of an input that is pooled."""
        self._room_of_input = (
            "an embedding's input may have one less" if generates else "truncate_prompt_tokens = -1 cuts it"
        )

    def check_known(self, ids: Sequence[int] | Ids, param: str) -> None:
        if not len(ids):
            return
        if isinstance(ids, np.ndarray):
            ids = ids[(ids < 0) | (ids >= self._vocab_size)].tolist()
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestRejected(Failure(400, f"'{param}': {self.unknown(int(token_id))}", param))

    def check_ids(self, ids: Ids, prompt: Prompt) -> None:
        """Refuse ids outside the vocabulary, with the position of the first if the client wrote them."""
        if len(ids) == 0 or np.maximum.reduce(ids.view(np.uint32)) < self._vocab_size:  # negative ones are large
            return
        index = int(np.argmax((ids < 0) | (ids >= self._vocab_size)))
        param = f"prompt[{index}]" if isinstance(prompt, IdsPrompt) else param_of(prompt)
        raise RequestRejected(Failure(400, f"'{param}': {self.unknown(int(ids[index]))}", param))

    def unknown(self, token_id: int) -> str:
        """Why an id is refused, in the words that the gateway and the Python client use too."""
        return f"token id {token_id} is out of vocabulary, the model's ids are 0..{self._vocab_size - 1}"

    def check_num(self, num_ids: int, prompt: Prompt, options: PromptOptions, *, embeds: bool = False) -> None:
        """Refuse more ids than any reply can be for, before they become Python objects: the interpreter makes a million
        of them in 30 ms, in which no other thread runs."""
        if options.any_length and num_ids > MAX_SHOWN_IDS and not options.truncate:
            message = f"the prompt has {num_ids} tokens, the limit is {MAX_SHOWN_IDS}"
            raise RequestRejected(Failure(400, message, param_of(prompt), "too_many_tokens"))
        if not options.any_length and not options.truncate and num_ids > self.max_model_len:
            raise self.too_long(str(num_ids), param_of(prompt), embeds=embeds)

    def check_size(self, text: str, prompt: ChatPrompt | TextPrompt, options: PromptOptions) -> None:
        """Refuse invalid text, and text that can't fit whatever its ids are."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise rejection("the prompt contains a lone surrogate, which is not a valid character", prompt) from None
        is_complete = not (options.any_length or options.truncate)
        if is_complete and self._max_id_bytes is not None and num_bytes > self.max_model_len * self._max_id_bytes:
            raise self.too_long(f"at least {-(-num_bytes // self._max_id_bytes)}", param_of(prompt))
        if num_bytes > (most := self._max_prompt_bytes):
            # The gateway has checked the size of the messages, but not of what the template makes of them.
            message = f"the prompt has {num_bytes} bytes of text, the limit is {most} (limits.max_prompt_bytes)"
            raise RequestRejected(Failure(400, message, param_of(prompt), "prompt_too_large"))

    def too_long(self, num_tokens: str, param: str, *, embeds: bool = False) -> RequestRejected:
        message = (
            f"this model's maximum context length is {self.max_model_len} tokens, and the prompt has {num_tokens}: "
            + ("there must be room for at least one output token" if not embeds else self._room_of_input)
        )
        return RequestRejected(Failure(400, message, param, "context_length_exceeded"))
