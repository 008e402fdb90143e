"""Makes one text of a query and a document with a chat template, for rerankers that are decoders.

    TextPrompt(query, document) ──variables──► template ──► text ──tokenizer──► ids, cut before the template's end

The template gets messages of the roles `query` and `document`, as in sentence-transformers and vLLM, and the same texts
as the variables `query` and `document`. An instruction is the variable `instruction`, and a `system` message before
them.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.runtime.messages import TextPrompt
from pipeline.runtime.model.model_folder import read_text
from pipeline.runtime.model.pooler import Pooler
from pipeline.stages.ingest.templates import conversation
from pipeline.stages.ingest.templates.budget import STEPS_PER_S, Budget, OutOfTime
from pipeline.stages.ingest.templates.chat_templates import SHORT_STEPS, NeedsTime, RenderedChat
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure, TextTooLong

KWARGS = "chat_template_kwargs"
INSTRUCTION = "instruction"
OWN_NAMES = ("messages", "query", "document", "tools", "documents", "chat_template", "tokenize")
"""Variables that a request can't set."""
PROBE_CHARS = 100_000
FILLERS = "0", "1 2 3 4"
"""Texts whose last tokens differ."""


class PairTemplate:
    """The template of one model. `instruction` and `variables` are those of requests that give none."""

    def __init__(
        self, template: ChatTemplate, timeout_s: float, *, instruction: str | None = None, variables: str = ""
    ) -> None:
        """Raises TemplateFailure if it does not write both texts."""
        self._template = template
        self._timeout_s = timeout_s
        self._instruction = instruction
        self._defaults = conversation.object_of(variables)
        base = self._tried()
        for role, changed in ("query", self._tried(first="b")), ("document", self._tried(second="d")):
            if changed == base:
                raise TemplateFailure(f"it does not write the content of the role {role!r}")
        try:
            self._takes_instruction = self._tried(instruction="e") != self._tried(instruction="f")
        except TemplateFailure:
            self._takes_instruction = False

    def render(
        self,
        prompt: TextPrompt,
        *,
        max_chars: int,
        is_short: bool,
        masked: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    ) -> RenderedChat:
        """The text of a pair, no longer than `max_chars`, and a second one of the same length if `masked` returns other
        variables. Raises BadChat, TemplateFailure, TextTooLong or OutOfTime, or NeedsTime if it `is_short` and takes
        long."""
        assert prompt.pair is not None
        variables = self._variables(prompt.text, prompt.pair, self._kwargs(prompt.template_kwargs))
        changed = masked(variables) if masked is not None else None
        num_steps = int(STEPS_PER_S * self._timeout_s) + len(prompt.text) + len(prompt.pair)
        budget = Budget(SHORT_STEPS) if is_short else Budget(num_steps, self._timeout_s, time.monotonic)
        try:
            text = self._template.render(variables, max_chars=max_chars, budget=budget, now_s=0.0)
            if changed is None:
                return RenderedChat(text)
            other = self._template.render(changed, max_chars=max_chars, budget=budget, now_s=0.0)
        except OutOfTime:
            if is_short:
                raise NeedsTime from None
            raise
        if len(other) != len(text):
            raise BadChat(
                "a text contains special tokens of the model, and the template of pairs changes with them: remove "
                "them, or set chat.allow_special_tokens_in_content",
                "prompt",
            )
        return RenderedChat(text, other)

    def fillers(self, template_kwargs: str) -> list[str]:
        """The texts of two pairs with the same variables, and nothing else in common. Raises as `render`."""
        pairs = [TextPrompt(filler, filler, template_kwargs) for filler in FILLERS]
        return [self.render(pair, max_chars=PROBE_CHARS, is_short=False).text for pair in pairs]

    def _kwargs(self, text: str) -> dict[str, Any]:
        """Raises BadChat."""
        if not text:
            return {}
        kwargs = conversation.object_of(text)
        for name in OWN_NAMES:
            if name in kwargs:
                raise BadChat(f"'{KWARGS}' can't have {name!r}: the pair of texts says it", KWARGS)
        instruction = kwargs.get(INSTRUCTION)
        if instruction is None:
            return kwargs
        if not isinstance(instruction, str):
            raise BadChat(f"'{INSTRUCTION}' must be a string, not {type(instruction).__name__}", INSTRUCTION)
        if not self._takes_instruction:
            raise BadChat(f"the model's template of pairs has no place for '{INSTRUCTION}'", INSTRUCTION)
        return kwargs

    def _variables(self, first: str, second: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values = {INSTRUCTION: self._instruction, "add_generation_prompt": False, **self._defaults, **kwargs}
        texts = {"system": values[INSTRUCTION], "query": first, "document": second}
        traits = self._template.traits
        as_parts = traits.parts and not traits.text_too
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in texts.items()
            if text is not None
        ]
        if values[INSTRUCTION] is None:
            del values[INSTRUCTION]  # templates test whether it is defined
        return {**values, "messages": messages, "query": first, "document": second, "tools": None, "documents": None}

    def _tried(self, first: str = "a", second: str = "c", instruction: str | None = None) -> str:
        variables = self._variables(first, second, {} if instruction is None else {INSTRUCTION: instruction})
        try:
            budget = Budget(int(STEPS_PER_S * self._timeout_s), self._timeout_s, time.monotonic)
            return self._template.render(variables, max_chars=PROBE_CHARS, budget=budget, now_s=0.0)
        except TextTooLong:
            raise TemplateFailure(f"it writes more than {PROBE_CHARS} characters for two words") from None
        except OutOfTime:
            raise TemplateFailure(f"it takes more than {self._timeout_s:g} s for two words") from None


def load(
    folder: Path, pooler: Pooler | None, special_tokens: Mapping[str, str], timeout_s: float
) -> PairTemplate | None:
    """The first of the model's templates for pairs that writes both texts; None if the tokenizer joins pairs. Raises
    UserError if none does."""
    pairs = None if pooler is None else pooler.pairs
    if pooler is None or pairs is None:
        return None
    prompt = pooler.default_prompt
    instruction = None if prompt is None else pooler.prompts.get(prompt)
    failures = []
    for file in pairs.files:
        try:
            template = ChatTemplate(read_text(folder / file), special_tokens)
            return PairTemplate(template, timeout_s, instruction=instruction, variables=pairs.variables)
        except (TemplateFailure, BadChat) as failure:
            failures.append(f"{failure}")
    raise UserError(
        f"the chat template makes no prompt of a query and a document: {'; '.join(failures)}. Set chat_template to a "
        "file with one for pairs, which writes the messages of the roles 'query' and 'document'"
    )
