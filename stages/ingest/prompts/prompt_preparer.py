"""Prepares prompts: rendered, tokenized, cut and checked, with what the reply shows of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from pipeline.config.settings import Settings
from pipeline.media.placeholders import Run
from pipeline.runtime import messages as m
from pipeline.runtime.messages import ChatPrompt, ExecuteFacts, GenerationOptions, IdsPrompt, Submit
from pipeline.runtime.process import heap
from pipeline.runtime.process.black_box import Breadcrumb
from pipeline.stages.ingest import reply_grammar
from pipeline.stages.ingest.media.prompt_images import PromptImages
from pipeline.stages.ingest.prompts import chat_cuts, prompt_processor
from pipeline.stages.ingest.prompts.chat_cuts import ChatCuts
from pipeline.stages.ingest.prompts.ids import Ids
from pipeline.stages.ingest.prompts.prompt_echo import PromptEcho
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.stages.ingest.reasoning_budgets import ReasoningBudgets
from pipeline.text.formats.chat_formats import ChatFormats

TRIM_CHARS = 500_000
"""After encoding this many characters or more, the memory that it took is given back: hundreds of megabytes."""


class PreparedPrompt(NamedTuple):
    """A prompt that is ready to be computed, and the parts of it that the reply shows."""

    ids: Ids
    max_tokens: int
    options: GenerationOptions
    text: str | None
    token_strs: list[str] | None
    pieces: list[bytes] | None
    tail: str | None
    cut_positions: list[int]
    image_runs: Sequence[Sequence[Run]] = ()
    """Of each image: where its rows are."""


class PromptPreparer:
    """Its methods run in any thread."""

    def __init__(
        self,
        processor: PromptProcessor,
        prompt_echo: PromptEcho,
        formats: ChatFormats,
        budgets: ReasoningBudgets,
        cuts: ChatCuts | None = None,
    ) -> None:
        """`cuts` are those of a model with recurrent layers."""
        self.processor = processor
        self._prompt_echo = prompt_echo
        self._formats = formats
        self._budgets = budgets
        self._cuts = cuts

    def prepare(
        self, submit: Submit, ids: Ids | None = None, images: PromptImages | None = None, *, is_short: bool = False
    ) -> PreparedPrompt:
        """Prepare a prompt, whose ids the client may have given, and whose images are decoded. Runs in any thread.
        Raises RequestRejected, or NeedsTime if it `is_short` but takes long."""
        prompt, prompt_options = submit.prompt, submit.prompt_options
        tail: str | None = None
        segment_start = submit.options.segment_start
        image_runs: Sequence[Sequence[Run]] = ()
        if ids is None and submit.options.pooling != m.Pooling.NONE and isinstance(prompt, m.TextPrompt):
            ids, segment_start = self.processor.encode_pooled(submit, is_short=is_short)
        elif ids is None:
            assert not isinstance(prompt, IdsPrompt)
            template_s = submit.template_s or submit.arrival_s
            has_budget = self._budgets.num_tokens(submit.options) >= 0
            reasoning = reply_grammar.format_of(submit, self._formats, has_budget=has_budget)
            whole, stage, image_runs = self.processor.encode(
                prompt, prompt_options, template_s, is_short=is_short, reasoning=reasoning, images=images
            )
            ids = self.processor.cut(whole, submit)
            if images is not None and len(ids) != len(whole):
                message = "'truncate_prompt_tokens' can't cut a prompt with images"
                raise RequestRejected(m.Failure(400, message, "truncate_prompt_tokens"))
            if reasoning is not None and stage is not None:
                is_whole = not prompt_options.truncates_right or len(ids) == len(whole)
                tail = reasoning.tail_of(stage) if is_whole else ""
        else:
            ids = self.processor.cut(ids, submit)
            image_runs = () if images is None else images.find(ids)
        max_tokens = self.processor.max_tokens(ids, submit)
        options = self.processor.complete(submit.options, max_tokens, segment_start)
        options = reply_grammar.after_reasoning(options, tail, self._formats)
        options = self._budgets.complete(options, prompt, tail)
        text = token_strs = pieces = None
        if prompt_options.with_text:
            is_cut = prompt_options.truncate != 0
            text = self._prompt_echo.text(prompt, ids.tolist(), is_continued=max_tokens > 0, is_cut=is_cut)
        if prompt_options.with_token_strs:
            token_strs = self._prompt_echo.token_strs(ids.tolist())
        if prompt_options.with_pieces:
            pieces = self._prompt_echo.pieces(ids.tolist())
        messages = prompt.messages if isinstance(prompt, ChatPrompt) else ()
        cut_positions = self._cuts.of(ids, messages) if self._cuts is not None else []
        return PreparedPrompt(ids, max_tokens, options, text, token_strs, pieces, tail, cut_positions, image_runs)

    def prepare_in_thread(
        self, submit: Submit, ids: Ids | None, images: PromptImages | None, cost: int, breadcrumb: Breadcrumb
    ) -> PreparedPrompt | RequestRejected:
        """The same in a thread, whose `breadcrumb` names the request meanwhile. `cost` is in characters."""
        with breadcrumb.at(submit.request_id, submit.attempt):
            try:
                return self.prepare(submit, ids, images)
            except RequestRejected as rejection:
                return rejection.with_traceback(None)  # which keeps what was encoded
            finally:
                if cost >= TRIM_CHARS:
                    heap.trim()


def load(
    folder: Path,
    facts: ExecuteFacts,
    tokenizer: Tokenizer,
    settings: Settings,
    formats: ChatFormats,
    max_new_tokens: int | None,
    *,
    excluded: Sequence[Sequence[int]],
    has_states: bool,
) -> PromptPreparer:
    """That of the model in a prepared folder. `max_new_tokens` and `excluded` are those of `PromptProcessor`;
    `has_states`: it has recurrent layers."""
    processor = prompt_processor.load(
        folder,
        facts,
        tokenizer,
        settings.limits,
        settings.chat,
        max_new_tokens,
        excluded=excluded,
        shows_tools=formats.shows_tools,
    )
    cuts = chat_cuts.of_template(processor.chat_templates, tokenizer) if has_states else None
    budgets = ReasoningBudgets(tokenizer, formats, settings.chat)
    return PromptPreparer(processor, PromptEcho(tokenizer), formats, budgets, cuts)
