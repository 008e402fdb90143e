"""Extends a client's grammar for chats: with tool calls that may replace the answer, and with reasoning before it.
Pure."""

import msgspec
import numpy as np
from tokenizers import Tokenizer

from pipeline.runtime.messages import ChatPrompt, Failure, GenerationOptions, Grammar, Submit
from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.ingest.prompt_processor import RequestRefused
from pipeline.text.formats.chat_formats import ChatFormats, SchemasTooLarge

TAIL_IDS = 48
"""How many of the prompt's last ids are decoded to find out whether it opens the reasoning. A mark is one id or a
few."""


def calls_beside(submit: Submit, formats: ChatFormats, max_bytes: int) -> Grammar | None:
    """The tool calls that are an alternative to the request's grammar: with tools and a response format, a reply may be
    either. None if the request has no such tools."""
    prompt, grammar = submit.prompt, submit.options.grammar
    if not isinstance(prompt, ChatPrompt) or not prompt.tools or prompt.tool_choice != "auto" or formats.tools is None:
        return None
    if grammar is not None and grammar.kind == "calls":  # strict functions, without a response format
        return None
    try:
        written = formats.calls("auto", "", prompt.tools, parallel=prompt.parallel_tool_calls, max_bytes=max_bytes)
    except SchemasTooLarge as error:
        raise RequestRefused(Failure(400, f"'tools': {error}", "tools", "invalid_grammar")) from None
    return Grammar("calls", msgspec.json.encode(written).decode(), "tools")


def as_answer(submit: Submit, grammar: Grammar, compiled: str, formats: ChatFormats) -> str:
    """A checked grammar of a reply, with what the model's format has before an answer. Calls have that already, and the
    prompt of a continued message too."""
    prompt = submit.prompt
    if not isinstance(prompt, ChatPrompt) or grammar.kind == "calls" or prompt.continue_final_message:
        return compiled
    return formats.as_answer(compiled)


def tail(submit: Submit, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", tokenizer: Tokenizer) -> str | None:
    """The end of a chat's text; None if it is not needed. Raises RequestRefused."""
    if not isinstance(submit.prompt, ChatPrompt):
        return None
    if not (submit.prompt_options.with_tail or submit.options.compiled_grammar):
        return None
    try:
        with panics_as_errors():
            return str(tokenizer.decode(ids[-TAIL_IDS:].tolist(), skip_special_tokens=False))
    except Exception as error:  # the library raises nothing more precise
        message = f"the prompt's token ids cannot be decoded: {error}"
        raise RequestRefused(Failure(400, message, "messages")) from error


def after_reasoning(options: GenerationOptions, tail: str | None, formats: ChatFormats) -> GenerationOptions:
    """Allow free reasoning before the grammar if the model reasons."""
    if tail is None or not options.compiled_grammar:
        return options
    grammar = formats.after_reasoning(options.compiled_grammar, tail)
    return msgspec.structs.replace(options, compiled_grammar=grammar)
