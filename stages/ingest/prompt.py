"""From what a client asked to the prompt's ids, or to the reason why not. No sockets, no shared memory.

    chat ──template──► text ──tokenizer──► ids ──max_tokens()──► how many may follow
    └───────────── encode() ─────────────┘        each may raise Refusal

`encode` takes about half a microsecond a character; other threads run meanwhile.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders

from pipeline.messages import (
    MAX_SHOWN_IDS,
    ChatPrompt,
    ExecuteFacts,
    Failure,
    Finish,
    IdsPrompt,
    Prompt,
    PromptOptions,
    Submit,
    TextPrompt,
)
from pipeline.model_folder import ModelConfig
from pipeline.stages.ingest.template import ChatTemplate, TemplateFailure, TextTooLong

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]

PLAIN = PromptOptions()

UNBOUNDED_CHARS_PER_ID = 256
"""Characters that a template may write per id of the model's length, for tokenizers that tell no bound themselves."""

TEMPLATE_GROWTH = 4
"""How many times as long as its messages a chat of any length may become."""

MESSAGE_CHARS = 40
"""What a template puts around a message, more or less."""


class Refusal(Exception):
    """The request can't be served; carries what the client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Prompts:
    """Makes prompts for one model.

    `template` is None where the model has none; `broken_template` says why it has none that works.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: ExecuteFacts,
        template: ChatTemplate | None = None,
        broken_template: str = "this model has no chat template: use /v1/completions",
        eos_ids: Collection[int] = (),
    ) -> None:
        # Threads share the tokenizer, so nothing may set these on the way.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._broken_template = broken_template
        self._eos_ids = eos_ids
        self._max_model_len = facts.max_model_len
        self._vocab_size = facts.vocab_size
        self._max_id_bytes = longest_id_bytes(tokenizer)

    def encode(
        self, prompt: ChatPrompt | TextPrompt, options: PromptOptions = PLAIN, now_s: float | None = None
    ) -> Ids:
        """The ids of a chat or a text, [n]. Chat templates write their special tokens themselves; `now_s` is the time
        of those that write it, Unix seconds. Raises Refusal."""
        is_chat = isinstance(prompt, ChatPrompt)
        text = self._render(prompt, options, now_s) if isinstance(prompt, ChatPrompt) else prompt.text
        self._check_size(text, prompt, options)
        add_special_tokens = not is_chat if options.add_special_tokens is None else options.add_special_tokens
        try:
            # Unlike `encode`, the batch call lets other threads run; "fast" leaves out the offsets that nobody reads.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises nothing more precise
            raise _refusal(f"the prompt cannot be tokenized: {error}", prompt) from error
        return np.array(encoding.ids, dtype=np.int32)

    def max_tokens(self, ids: Ids, submit: Submit) -> int:
        """Check everything that needs the ids. Returns how many tokens may be generated at most. Raises Refusal."""
        param = _param(submit.prompt)
        self._check_ids(ids, submit.prompt)
        if submit.prompt_options.any_length:
            if len(ids) > MAX_SHOWN_IDS:
                message = f"there are {len(ids)} tokens in it, and at most {MAX_SHOWN_IDS} are taken at once"
                raise Refusal(Failure(400, message, param, "too_many_tokens"))
            return 0
        if len(ids) == 0:
            raise _refusal("the prompt is empty", submit.prompt)
        for stop_id in submit.sampling.stop_token_ids:
            if not 0 <= stop_id < self._vocab_size:
                message = f"stop token id {stop_id} is not one of the model's 0..{self._vocab_size - 1}"
                raise Refusal(Failure(400, message, "stop_token_ids"))
        room = self._max_model_len - len(ids)
        if room < 1 and (submit.max_tokens != 0 or room < 0):
            raise self._too_long(str(len(ids)), param)
        if submit.max_tokens is None:
            return room
        if submit.max_tokens < 0:
            raise Refusal(Failure(400, f"max_tokens can't be {submit.max_tokens}", "max_tokens"))
        if submit.max_tokens > room:
            message = (
                f"this model's maximum context length is {self._max_model_len} tokens; you asked for "
                f"{len(ids) + submit.max_tokens}: {len(ids)} in the prompt and {submit.max_tokens} to generate"
            )
            raise Refusal(Failure(400, message, "max_tokens", "context_length_exceeded"))
        return submit.max_tokens

    def check_outputs(self, outputs: Sequence[Ids], submit: Submit, max_tokens: int) -> bytes:
        """Check output ids that the client has already, one array a sequence. Returns a `Finish` for each, uint8: STOP
        where the last id ends the sequence. Raises Refusal."""
        stops = set(submit.sampling.stop_token_ids)
        if not submit.sampling.ignore_eos:
            stops.update(self._eos_ids)
        finishes = bytearray()
        for index, ids in enumerate(outputs):
            if len(ids) > max_tokens:
                raise _of_outputs(index, f"has {len(ids)} ids, more than the {max_tokens} that may be generated")
            if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
                wrong = int(ids[(ids < 0) | (ids >= self._vocab_size)][0])
                raise _of_outputs(index, f"has token id {wrong}, not one of the model's 0..{self._vocab_size - 1}")
            ends = np.flatnonzero(np.isin(ids, list(stops))).tolist() if stops else []
            if ends and ends[0] < len(ids) - 1:
                raise _of_outputs(index, f"goes on after token id {ids[ends[0]]}, which ends a sequence")
            finishes.append(Finish.STOP if ends else Finish.NONE)
        return bytes(finishes)

    def _check_ids(self, ids: Ids, prompt: Prompt) -> None:
        """Refuse ids that the model does not have, and say where the first one stands if the client wrote them."""
        if len(ids) == 0 or (ids.min() >= 0 and ids.max() < self._vocab_size):
            return
        place = int(np.argmax((ids < 0) | (ids >= self._vocab_size)))
        message = f"token id {ids[place]} of the prompt is not one of the model's 0..{self._vocab_size - 1}"
        param = f"prompt[{place}]" if isinstance(prompt, IdsPrompt) else _param(prompt)
        raise Refusal(Failure(400, message, param))

    def _check_size(self, text: str, prompt: ChatPrompt | TextPrompt, options: PromptOptions) -> None:
        """Refuse what is no text, and what can't fit whatever its ids are."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise _refusal("the prompt holds half a surrogate pair, which is no character", prompt) from None
        if options.any_length:
            return
        if self._max_id_bytes is not None and num_bytes > self._max_model_len * self._max_id_bytes:
            raise self._too_long(f"at least {-(-num_bytes // self._max_id_bytes)}", _param(prompt))

    def _render(self, prompt: ChatPrompt, options: PromptOptions, now_s: float | None) -> str:
        if self._template is None:
            raise Refusal(Failure(400, self._broken_template, "messages"))
        if not prompt.messages:
            raise Refusal(Failure(400, "messages is empty: at least one message is needed", "messages"))
        max_chars = self._max_model_len * (self._max_id_bytes or UNBOUNDED_CHARS_PER_ID)
        if options.any_length:
            max_chars = max(max_chars, TEMPLATE_GROWTH * num_chars(prompt))
        try:
            return self._template.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                max_chars=max_chars,
                now_s=now_s,
            )
        except TemplateFailure as failure:
            raise Refusal(Failure(400, str(failure), "messages")) from failure
        except TextTooLong:
            raise self._too_long(f"more than {self._max_model_len}", "messages") from None

    def _too_long(self, num_tokens: str, param: str) -> Refusal:
        message = (
            f"this model's maximum context length is {self._max_model_len} tokens, and the prompt has {num_tokens}: "
            "there must be room for at least one more"
        )
        return Refusal(Failure(400, message, param, "context_length_exceeded"))


def load(folder: Path, facts: ExecuteFacts, tokenizer: Tokenizer) -> Prompts:
    """Make prompts for the model in a prepared folder."""
    config = ModelConfig.load(folder)
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return Prompts(tokenizer, facts, eos_ids=config.eos_ids)
    bos_token = tokenizer.id_to_token(config.bos_id) if config.bos_id is not None else None
    eos_token = tokenizer.id_to_token(config.eos_ids[0]) if config.eos_ids else None
    try:
        template = ChatTemplate(path.read_text(encoding="utf-8"), bos_token or "", eos_token or "")
    except TemplateFailure as failure:
        return Prompts(tokenizer, facts, broken_template=str(failure), eos_ids=config.eos_ids)
    return Prompts(tokenizer, facts, template, eos_ids=config.eos_ids)


def longest_id_bytes(tokenizer: Tokenizer) -> int | None:
    """The most bytes of text that one id can stand for, where every byte of a text is in some id; None where a text
    may shrink on the way (normalisation, unknown tokens that swallow, added tokens that take spaces with them)."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    byte_fallback = bool(getattr(tokenizer.model, "byte_fallback", False))
    if not (byte_level or byte_fallback) or not _keeps_every_byte(tokenizer.normalizer):
        return None
    # Vocabularies spell a byte as a character of one or more bytes, so the spelling is never shorter.
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=None)


def _keeps_every_byte(normalizer: Any) -> bool:
    """Whether a normaliser at most adds to a text: none, or SentencePiece's marks for spaces."""
    if normalizer is None:
        return True
    return _only_marks_spaces(json.loads(normalizer.__getstate__()))


def _only_marks_spaces(state: dict[str, Any]) -> bool:
    match state:
        case {"type": "Sequence", "normalizers": list(parts)}:
            return all(_only_marks_spaces(part) for part in parts)
        case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
    return False


def num_chars(prompt: ChatPrompt | TextPrompt) -> int:
    """About how long a prompt is, templates aside: what it costs to make its ids."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(message.content or "") + MESSAGE_CHARS for message in prompt.messages)


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _refusal(message: str, prompt: Prompt) -> Refusal:
    return Refusal(Failure(400, message, _param(prompt)))


def _of_outputs(index: int, problem: str) -> Refusal:
    return Refusal(Failure(400, f"received[{index}] {problem}", "received"))
