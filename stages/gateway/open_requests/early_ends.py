"""Ends open replies before the model does: the operator replaces the server, and chose how (docs/recovery.md).

A reply that ends early has the finish_reason `length`, as one that reached its limit of tokens. What its client has got
is text of the model up to the end of a sentence, or up to now, and behind it the operator's closing text.
"""

import re

import msgspec

from pipeline.runtime import messages as m
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput

SENTENCE_END = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]["')\]*_\u00bb\u201d\u2019]*\s*$|\n\s*$""")
"""A text that ends so ends with a sentence, or with a line."""


class EarlyEnds(msgspec.Struct, frozen=True):
    """When and how open replies end early."""

    at: m.FinishAt
    closing_text: str = ""

    def may_end(self, prompt_request: PromptRequest) -> bool:
        """Whether a reply may be cut. One whose text has a form that a sentence's end would break may only be cut
        now."""
        parsed, options = prompt_request.request.parsed, prompt_request.submit.options
        if parsed.is_pooled or parsed.is_prompt_only or parsed.hides_output or options.use_beam_search:
            return False
        return self.at == "now" or (self.at == "sentence" and not _has_form(prompt_request))

    def ends(self, prompt_request: PromptRequest, text: str) -> bool:
        """Whether a sequence ends now, whose newest text this is."""
        if not self.may_end(prompt_request):
            return False
        return self.at == "now" or SENTENCE_END.search(text) is not None

    def close(self, prompt_request: PromptRequest, sequence: SequenceOutput) -> None:
        """Put the operator's text behind that of a sequence which ends now."""
        if self.closing_text and not _has_form(prompt_request):
            sequence.pending.append(self.closing_text)
            sequence.num_chars += len(self.closing_text)


def _has_form(prompt_request: PromptRequest) -> bool:
    """Whether the client expects more than prose: a grammar's text, or perhaps calls of tools."""
    options, reply = prompt_request.submit.options, prompt_request.request.parsed.reply
    has_tools = reply is not None and bool(reply.tools) and reply.tool_choice != "none"
    return has_tools or options.grammar is not None or bool(options.compiled_grammar)
