"""Converts a client's prompt to token ids, or refuses it. No sockets, no shared memory.

    chat ──template──► text ──tokenizer──► ids ──cut()──► ids ──max_tokens()──► limit of output tokens
    └───────────── encode() ─────────────┘               complete() ► options, with bad words as ids

Each may raise RequestRejected. `encode` takes about half a microsecond per character and lets other threads run.
"""

import functools
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from pipeline.config.settings import ChatSettings, LimitSettings
from pipeline.runtime.messages import (
    BEGIN,
    ChatPrompt,
    ExecuteFacts,
    Failure,
    Finish,
    GenerationOptions,
    Pooling,
    PromptOptions,
    Submit,
    TextPrompt,
)
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.ingest.media.prompt_images import PromptImages
from pipeline.stages.ingest.prompts import bad_words
from pipeline.stages.ingest.prompts.bad_words import BadWord
from pipeline.stages.ingest.prompts.content_specials import ContentSpecials
from pipeline.stages.ingest.prompts.ids import EncodedPrompt, Ids, as_int32
from pipeline.stages.ingest.prompts.longest_id import longest_id_bytes
from pipeline.stages.ingest.prompts.pooled_prompts import Pairs, PooledIds, PooledPrompts
from pipeline.stages.ingest.prompts.prompt_checks import PromptChecks
from pipeline.stages.ingest.prompts.prompt_cost import num_bytes
from pipeline.stages.ingest.prompts.rejection import RequestRejected, param_of, received_rejection, rejection
from pipeline.stages.ingest.templates import chat_templates, pair_template
from pipeline.stages.ingest.templates.budget import OutOfTime
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates, RenderedChat
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import TemplateFailure, TextTooLong
from pipeline.text.formats.reasoning import ReasoningFormat

PLAIN = PromptOptions()
LIMITS = LimitSettings()
CHAT = ChatSettings()

UNBOUNDED_CHARS_PER_ID = 256
"""Characters that a template may write per token of the model's length, if the tokenizer gives no bound."""

TEMPLATE_GROWTH = 4
"""How many times the length of its messages a chat with `any_length` or `truncate` may have."""

NUM_KEPT = 4
"""Lists of bad words whose ids are kept, of several clients at once, and as many predictions: 8 MB each at most."""


class PromptProcessor:
    """Processes prompts for one model. `limits` are settings. `max_new_tokens` is the model's default for `max_tokens`;
    None is what fits the context. `excluded` are runs of ids that the model never samples. `pairs` and
    `has_token_types` are those of `PooledPrompts`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: ExecuteFacts,
        templates: ChatTemplates,
        limits: LimitSettings,
        eos_ids: Collection[int] = (),
        max_new_tokens: int | None = None,
        *,
        excluded: Sequence[Sequence[int]] = (),
        allow_special_tokens_in_content: bool = True,
        generates: bool = True,
        has_token_types: bool = False,
        pairs: Pairs | None = None,
    ) -> None:
        # Threads share the tokenizer, so these must not change later.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._specials = None if allow_special_tokens_in_content else ContentSpecials(tokenizer)
        self.chat_templates = templates
        self._limits = limits
        self._eos_ids = eos_ids
        self._max_new_tokens = max_new_tokens
        self._max_model_len = facts.max_model_len
        self._vocab_size = facts.vocab_size
        # Those that the vocabulary lacks can't be sampled anyway.
        self._excluded = [list(run) for run in excluded if max(run) < facts.vocab_size]
        self._uses_predictions = facts.num_speculative_tokens > 0
        self._max_id_bytes = longest_id_bytes(tokenizer)
        self._max_chars = facts.max_model_len * (self._max_id_bytes or UNBOUNDED_CHARS_PER_ID)
        """Of the text of a prompt that is not truncated."""
        self._checks = PromptChecks(
            facts.max_model_len, facts.vocab_size, self._max_id_bytes, limits.max_prompt_bytes, generates=generates
        )
        self._pooled = PooledPrompts(
            tokenizer,
            self._checks,
            self._specials,
            pairs,
            has_token_types=has_token_types,
            max_chars=lambda prompt: max(self._max_chars, TEMPLATE_GROWTH * num_bytes(prompt)),
            timeout_s=limits.template_timeout_s,
        )
        # The prompts of one request have the same words and prediction, and come one after the other.
        self._runs_of = functools.lru_cache(NUM_KEPT)(self._as_runs)
        self._predicted_ids = functools.lru_cache(NUM_KEPT)(self._as_predicted_ids)

    def encode(
        self,
        prompt: ChatPrompt | TextPrompt,
        options: PromptOptions = PLAIN,
        now_s: float | None = None,
        *,
        is_short: bool = False,
        reasoning: ReasoningFormat | None = None,
        images: PromptImages | None = None,
    ) -> EncodedPrompt:
        """The ids of a chat or a text, and how the reply to a chat begins in this format of `reasoning`. `images` are
        its own. Chat templates write special tokens themselves; `now_s` is the time for templates that write
        it, Unix seconds. Raises RequestRejected, or NeedsTime if it `is_short` but the chat's template takes long."""
        is_chat = isinstance(prompt, ChatPrompt)
        if isinstance(prompt, ChatPrompt):
            text, masked, stage = self._render(prompt, options, now_s, is_short, reasoning)
            if images is not None:
                text, masked = images.put_into(text, masked)
        else:
            text, masked, stage = prompt.text, None, None
            if images is not None:
                text, _ = images.put_into(text, None)
        self._checks.check_size(text, prompt, options)
        add_special_tokens = not is_chat if options.add_special_tokens is None else options.add_special_tokens

        def check_num(num_ids: int) -> None:
            self._checks.check_num(num_ids + (0 if images is None else images.num_further), prompt, options)

        try:
            # Unlike `encode`, the batch call lets other threads run; "fast" omits the offsets, which are not needed.
            with panics_as_errors():
                if masked is not None and self._specials is not None:
                    ids = self._specials.encode(
                        text, masked, add_special_tokens=add_special_tokens, check_num=check_num
                    )
                else:
                    (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                    check_num(len(encoding))
                    ids = encoding.ids
        except RequestRejected:
            raise
        except Exception as error:  # the library raises nothing more precise
            raise rejection(f"the prompt cannot be tokenized: {error}", prompt) from error
        try:
            array = as_int32(ids)
        except OverflowError as error:
            message = "the prompt cannot be tokenized: the tokenizer has token ids above 2147483647"
            raise rejection(message, prompt) from error
        array, runs = (array, ()) if images is None else images.expand(array)
        return EncodedPrompt(array, stage, runs)

    def encode_pooled(self, submit: Submit, *, is_short: bool = False) -> PooledIds:
        """The ids of a text or a pair of texts that is pooled, truncated if the request asks for that. Raises
        RequestRejected, or NeedsTime if it `is_short` but the template of pairs takes long."""
        return self._pooled.encode(submit, self._keep_of(submit), is_short=is_short)

    def cut(self, ids: Ids, submit: Submit) -> Ids:
        """The last `truncate` ids of a prompt, or the first. Raises RequestRejected."""
        options = submit.prompt_options
        keep = self._keep_of(submit)
        if keep is None:
            return ids
        self._checks.check_ids(ids, submit.prompt)
        return ids[:keep] if options.truncates_right else ids[-keep:]

    def _keep_of(self, submit: Submit) -> int | None:
        """How many ids of the prompt are kept; None for all. Raises RequestRejected."""
        options, keep = submit.prompt_options, submit.prompt_options.truncate
        if keep == 0:
            return None
        if keep > self._max_model_len or keep < -1:
            message = (
                f"'truncate_prompt_tokens' can't be {keep}: use 1 to {self._max_model_len}, the model's maximum "
                "context length, or -1 to leave room for the output"
            )
            raise RequestRejected(Failure(400, message, "truncate_prompt_tokens"))
        if keep == -1 and submit.options.pooling != Pooling.NONE:
            return self._checks.most_pooled
        if keep == -1:
            following = 0 if options.any_length else submit.options.max_tokens
            following = 1 if following is None else following
            keep = max(self._max_model_len - following, 1)
        return keep

    def complete(self, options: GenerationOptions, max_tokens: int, segment_start: int = 0) -> GenerationOptions:
        """Check the options against the vocabulary, and add what needs the tokenizer. Raises RequestRejected."""
        self._checks.check_known(options.stop_token_ids, "stop_token_ids")
        self._checks.check_known(options.bias_ids, "logit_bias")
        self._checks.check_known(options.logprob_token_ids, "logprob_token_ids")
        self._checks.check_known(np.frombuffer(options.allowed_ids, np.int32), "allowed_token_ids")
        runs: list[list[int]] = []
        if options.bad_words:
            try:
                runs = self._runs_of(tuple(options.bad_words))
            except BadWord as error:
                raise RequestRejected(Failure(400, str(error), "bad_words")) from error
        completed = msgspec.structs.replace(
            options,
            max_tokens=max_tokens,
            segment_start=segment_start,
            bad_words=[],
            bad_words_ids=runs if options.pooling != Pooling.NONE else [*self._excluded, *runs],
            prediction="",
            predicted_ids=self._predicted_ids(options.prediction),
        )
        self._check_first_token(completed)
        return completed

    def _as_runs(self, words: tuple[str, ...]) -> list[list[int]]:
        return bad_words.as_ids(self._tokenizer, words, self._vocab_size)

    def _as_predicted_ids(self, text: str) -> bytes:
        """The first ids of a predicted text, as many as fit into the context; int32. Raises RequestRejected."""
        if not (text and self._uses_predictions):
            return b""
        # More text than this can't matter, and as above, only the batch call lets other threads run.
        text = text[: self._max_chars]
        try:
            with panics_as_errors():
                (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # the library raises nothing more precise
            message = f"'prediction' can't be tokenized: {error}"
            raise RequestRejected(Failure(400, message, "prediction")) from error
        encoding.truncate(self._max_model_len)
        known = np.array(encoding.ids, np.int64)
        return known[(known >= 0) & (known < self._vocab_size)].astype(np.int32).tobytes()

    def _check_first_token(self, options: GenerationOptions) -> None:
        """Refuse options that exclude every first id. Raises RequestRejected."""
        if not options.allowed_ids:
            return
        forbidden = {run[-1] for run in options.bad_words_ids if run[:-1] in ([], [BEGIN])}
        if options.min_tokens > 0:
            forbidden.update(self._eos_ids, options.stop_token_ids)
        allowed = np.frombuffer(options.allowed_ids, np.int32)
        if np.isin(allowed, np.fromiter(forbidden, np.int64, len(forbidden))).all():
            message = (
                "'allowed_token_ids' leaves no first token: 'bad_words', the model's generation_config.json, or "
                "'min_tokens' with the stop tokens, excludes all of them"
            )
            raise RequestRejected(Failure(400, message, "allowed_token_ids", "nothing_left"))

    def max_tokens(self, ids: Ids, submit: Submit) -> int:
        """Check everything that needs the ids. Returns the most tokens that may be generated. Raises
        RequestRejected."""
        param = param_of(submit.prompt)
        self._checks.check_ids(ids, submit.prompt)
        if submit.prompt_options.any_length:
            self._checks.check_num(len(ids), submit.prompt, msgspec.structs.replace(submit.prompt_options, truncate=0))
            return 0
        if len(ids) == 0:
            raise rejection("the prompt is empty", submit.prompt)
        if submit.options.pooling != Pooling.NONE:
            if len(ids) > self._checks.most_pooled:
                raise self._checks.too_long(str(len(ids)), param, embeds=True)
            return 1
        max_tokens, room = submit.options.max_tokens, self._max_model_len - len(ids)
        if room < 1 and (max_tokens != 0 or room < 0):
            raise self._checks.too_long(str(len(ids)), param)
        if max_tokens is None:
            # A default never makes a request invalid.
            return (
                room
                if self._max_new_tokens is None
                else min(room, max(self._max_new_tokens, submit.options.min_tokens))
            )
        if max_tokens < 0:
            raise RequestRejected(Failure(400, f"max_tokens can't be {max_tokens}", "max_tokens"))
        if max_tokens > room and submit.prompt_options.lowers_max_tokens:
            return room
        if max_tokens > room:
            message = (
                f"this model's maximum context length is {self._max_model_len} tokens; you asked for "
                f"{len(ids) + max_tokens}: {len(ids)} in the prompt and {max_tokens} to generate"
            )
            raise RequestRejected(Failure(400, message, "max_tokens", "context_length_exceeded"))
        return max_tokens

    def check_outputs(self, outputs: Sequence[Ids], submit: Submit, max_tokens: int) -> bytes:
        """Check output ids that the client already has, one array per sequence. Returns a `Finish` for each, uint8:
        STOP if the last id ends the sequence. Raises RequestRejected."""
        stops = set(submit.options.stop_token_ids)
        if not submit.options.ignore_eos or submit.options.compiled_grammar:
            stops.update(self._eos_ids)
        finishes = bytearray()
        for index, ids in enumerate(outputs):
            if len(ids) > max_tokens:
                raise received_rejection(index, f"has {len(ids)} ids, but at most {max_tokens} may be generated")
            if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
                wrong = int(ids[(ids < 0) | (ids >= self._vocab_size)][0])
                raise received_rejection(index, f"has an unknown id: {self._checks.unknown(wrong)}")
            ends = np.flatnonzero(np.isin(ids, list(stops))).tolist() if stops else []
            if ends and ends[0] < len(ids) - 1:
                raise received_rejection(index, f"has ids after token id {ids[ends[0]]}, which ends a sequence")
            finishes.append(Finish.STOP if ends else Finish.NONE)
        return bytes(finishes)

    def _render(
        self,
        prompt: ChatPrompt,
        options: PromptOptions,
        now_s: float | None,
        is_short: bool,
        reasoning: ReasoningFormat | None,
    ) -> RenderedChat:
        """The text of a chat, and the same with the client's special tokens masked, if it has any."""
        if not prompt.messages:
            raise RequestRejected(Failure(400, "'messages' must not be an empty array", "messages"))
        max_chars = self._max_chars
        if options.any_length or options.truncate:
            max_chars = max(max_chars, TEMPLATE_GROWTH * num_bytes(prompt))
        try:
            return self.chat_templates.render(
                prompt,
                max_chars=max_chars,
                now_s=now_s,
                is_short=is_short,
                masked=self._specials.masked if self._specials is not None else None,
                reasoning=reasoning,
            )
        except BadChat as error:
            raise RequestRejected(Failure(400, str(error), error.param)) from error
        except TemplateFailure as failure:
            raise RequestRejected(Failure(400, str(failure), "messages")) from failure
        except TextTooLong:
            raise self._checks.too_long(f"more than {self._max_model_len}", "messages") from None
        except OutOfTime:
            message = f"the chat template took longer than {self._limits.template_timeout_s:g} s with these messages"
            raise RequestRejected(Failure(400, message, "messages", "template_timeout")) from None


def load(
    folder: Path,
    facts: ExecuteFacts,
    tokenizer: Tokenizer,
    limits: LimitSettings = LIMITS,
    chat: ChatSettings = CHAT,
    max_new_tokens: int | None = None,
    *,
    excluded: Sequence[Sequence[int]] = (),
    shows_tools: bool = True,
) -> PromptProcessor:
    """Create the processor for the model in a prepared folder. `shows_tools`: its chat template shows tools."""
    config = ModelConfig.load(folder)
    tokenizer.encode_special_tokens = config.split_special_tokens
    special_tokens = _special_tokens_of(config, tokenizer)
    templates = chat_templates.load(folder, special_tokens, limits.template_timeout_s, shows_tools=shows_tools)
    return PromptProcessor(
        tokenizer,
        facts,
        templates,
        limits,
        config.eos_ids,
        max_new_tokens,
        excluded=excluded,
        allow_special_tokens_in_content=chat.allow_special_tokens_in_content,
        generates=config.generates,
        has_token_types=config.token_types > 1,
        pairs=pairs_of(folder, tokenizer, limits),
    )


def pairs_of(folder: Path, tokenizer: Tokenizer, limits: LimitSettings) -> Pairs | None:
    """How the template of the model in a prepared folder makes prompts of pairs; None if the tokenizer joins them.
    Raises UserError if the templates that the model has don't write both texts."""
    config = ModelConfig.load(folder)
    specials = _special_tokens_of(config, tokenizer)
    template = pair_template.load(folder, config.pooler, specials, limits.template_timeout_s)
    if template is None or config.pooler is None or config.pooler.pairs is None:
        return None
    return Pairs(template, config.pooler.pairs.adds_special_tokens)


def _special_tokens_of(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """The variables of templates with special tokens."""
    if config.special_tokens is not None:
        return config.special_tokens
    bos_token = tokenizer.id_to_token(config.bos_id) if config.bos_id is not None else None
    eos_token = tokenizer.id_to_token(config.eos_ids[0]) if config.eos_ids else None
    return {"bos_token": bos_token or "", "eos_token": eos_token or ""}
