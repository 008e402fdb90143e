"""Ids of a text or a pair of texts that a model's pooler reads, as the request wants them truncated.

text, or pair ──────────────tokenizer──► ids, types      pooled_text.py
pair ──template──► text ────tokenizer──► ids             of rerankers that are decoders
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Tokenizer

from pipeline.runtime.messages import Failure, Submit, TextPrompt
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.ingest.prompts.content_specials import ContentSpecials
from pipeline.stages.ingest.prompts.ids import Ids, as_int32
from pipeline.stages.ingest.prompts.pooled_layout import TokenTypesError
from pipeline.stages.ingest.prompts.pooled_text import NoRoomError, PooledTexts, Truncation
from pipeline.stages.ingest.prompts.prompt_checks import PromptChecks
from pipeline.stages.ingest.prompts.rejection import RequestRejected, rejection
from pipeline.stages.ingest.templates.budget import OutOfTime
from pipeline.stages.ingest.templates.chat_templates import NeedsTime
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.pair_template import KWARGS, PairTemplate
from pipeline.stages.ingest.templates.template import TemplateFailure, TextTooLong

NUM_KEPT_ENDS = 16
MAX_KEPT_CHARS = 4096
"""Ends of templates that are kept, by the variables of a request, and how long these may be."""


class PooledIds(NamedTuple):
    ids: Ids
    """int32 [n]"""
    segment_start: int = 0
    """As in `GenerationOptions`."""


class Pairs(NamedTuple):
    """How a model's template makes prompts of pairs."""

    template: PairTemplate
    adds_special_tokens: bool
    """As in `PairTemplates`."""


class PooledPrompts:
    """Those of one model. `has_token_types`: the second text of a pair has another type than the first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        checks: PromptChecks,
        specials: ContentSpecials | None,
        pairs: Pairs | None,
        *,
        has_token_types: bool,
        max_chars: Callable[[TextPrompt], int],
        timeout_s: float,
    ) -> None:
        """`max_chars` bounds the text of a template. `timeout_s` is in errors of the template."""
        self._tokenizer = tokenizer
        self._texts = PooledTexts(tokenizer, checks.max_model_len)
        self._checks = checks
        self._specials = specials
        self._pairs = pairs
        self._has_token_types = has_token_types
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self._kept_end = functools.lru_cache(NUM_KEPT_ENDS)(self._find_end)

    def encode(self, submit: Submit, keep: int | None, *, is_short: bool) -> PooledIds:
        """The ids of a text or a pair, at most `keep`. Raises RequestRejected, or NeedsTime if it `is_short` but the
        template of pairs takes long."""
        prompt = submit.prompt
        assert isinstance(prompt, TextPrompt)
        try:
            with panics_as_errors():
                if prompt.pair is not None and self._pairs is not None:
                    return PooledIds(self._of_template(prompt, submit, self._pairs, keep, is_short))
                if prompt.template_kwargs:
                    message = (
                        f"'instruction' and '{KWARGS}' need a model with a template for pairs of texts, which this one "
                        "does not have"
                    )
                    raise RequestRejected(Failure(400, message, "instruction"))
                self._checks.check_size(prompt.text + (prompt.pair or ""), prompt, submit.prompt_options)
                encoded = self._texts.encode(
                    prompt,
                    Truncation(keep, submit.prompt_options.truncates_right),
                    submit.scope_id,
                    add_special_tokens=submit.prompt_options.add_special_tokens is not False,
                    check_num=self._check_num(submit),
                )
            return PooledIds(encoded.ids, encoded.segment_start if self._has_token_types else 0)
        except RequestRejected:
            raise
        except NoRoomError as error:
            message = f"'truncate_prompt_tokens' must be at least {error}, the tokens that the tokenizer adds"
            raise RequestRejected(Failure(400, message, "truncate_prompt_tokens")) from error
        except TokenTypesError:
            raise rejection("the tokenizer gives this prompt token types that are not supported", prompt) from None
        except NeedsTime:
            raise
        except Exception as error:  # the library raises nothing more precise; OverflowError: an id above int32
            raise rejection(f"the prompt cannot be tokenized: {error}", prompt) from error

    def _check_num(self, submit: Submit) -> Callable[[int], None]:
        return lambda num_ids: self._checks.check_num(num_ids, submit.prompt, submit.prompt_options, embeds=True)

    # Templates

    def _of_template(self, prompt: TextPrompt, submit: Submit, pairs: Pairs, keep: int | None, is_short: bool) -> Ids:
        options = submit.prompt_options
        if keep is not None and not options.truncates_right:
            message = "'truncation_side' must be right: the model's template of pairs is cut before its end"
            raise RequestRejected(Failure(400, message, "truncation_side"))
        masked = None if self._specials is None else self._specials.masked
        try:
            rendered = pairs.template.render(
                prompt, max_chars=self._max_chars(prompt), is_short=is_short, masked=masked
            )
            self._checks.check_size(rendered.text, prompt, options)
            if rendered.masked is not None and self._specials is not None:
                ids = self._specials.encode(
                    rendered.text,
                    rendered.masked,
                    add_special_tokens=pairs.adds_special_tokens,
                    check_num=self._check_num(submit),
                )
            else:
                ids = self._encoded(rendered.text, pairs, self._check_num(submit))
            if keep is None or len(ids) <= keep:
                return as_int32(ids)
            end = self._end_of(prompt.template_kwargs)
        except BadChat as error:
            raise RequestRejected(Failure(400, str(error), error.param)) from error
        except TemplateFailure as failure:
            raise rejection(str(failure), prompt) from failure
        except TextTooLong:
            raise self._checks.too_long(f"more than {self._checks.most_pooled}", "prompt", embeds=True) from None
        except OutOfTime:
            message = f"the template of pairs took longer than {self._timeout_s:g} s with these texts"
            raise RequestRejected(Failure(400, message, "prompt", "template_timeout")) from None
        if keep <= len(end):
            message = f"'truncate_prompt_tokens' must be more than {len(end)}, the tokens at the end of the template"
            raise RequestRejected(Failure(400, message, "truncate_prompt_tokens"))
        return as_int32([*ids[: keep - len(end)], *end])

    def _encoded(self, text: str, pairs: Pairs, check_num: Callable[[int], None] = lambda _: None) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=pairs.adds_special_tokens)
        check_num(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _end_of(self, template_kwargs: str) -> list[int]:
        """The ids that all pairs with these variables end with: no part of a text."""
        find = self._kept_end if len(template_kwargs) <= MAX_KEPT_CHARS else self._find_end
        return find(template_kwargs)

    def _find_end(self, template_kwargs: str) -> list[int]:
        assert self._pairs is not None
        first, other = (self._encoded(text, self._pairs) for text in self._pairs.template.fillers(template_kwargs))
        num = 0
        for one, two in zip(reversed(first), reversed(other), strict=False):
            if one != two:
                break
            num += 1
        return first[len(first) - num :]
