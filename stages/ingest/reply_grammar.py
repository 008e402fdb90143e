"""Extends a client's grammar for chats: with tool calls that may replace the answer, and with reasoning before it.
Pure."""

import msgspec

from pipeline.runtime.messages import ChatPrompt, Failure, GenerationOptions, Grammar, Submit
from pipeline.runtime.process.black_box import Breadcrumb
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.text.formats.chat_formats import ChatFormats, SchemasTooLarge
from pipeline.text.formats.reasoning import ReasoningFormat


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
        raise RequestRejected(Failure(400, f"'tools': {error}", "tools", "invalid_grammar")) from None
    return Grammar("calls", msgspec.json.encode(written).decode(), "tools")


def as_answer(submit: Submit, grammar: Grammar, compiled: str, formats: ChatFormats) -> str:
    """A checked grammar of a reply, with what the model's format has before an answer. Calls have that already, and the
    prompt of a continued message too."""
    prompt = submit.prompt
    if not isinstance(prompt, ChatPrompt) or grammar.kind == "calls" or prompt.continue_final_message:
        return compiled
    return formats.as_answer(compiled)


def format_of(submit: Submit, formats: ChatFormats, *, has_budget: bool) -> ReasoningFormat | None:
    """The format of the reply's reasoning, if it matters how the reply begins."""
    matters = submit.prompt_options.with_tail or submit.options.compiled_grammar or has_budget
    return formats.reasoning if isinstance(submit.prompt, ChatPrompt) and matters else None


def after_reasoning(options: GenerationOptions, tail: str | None, formats: ChatFormats) -> GenerationOptions:
    """Allow free reasoning before the grammar if the model reasons."""
    if tail is None or not options.compiled_grammar:
        return options
    grammar = formats.after_reasoning(options.compiled_grammar, tail)
    return msgspec.structs.replace(options, compiled_grammar=grammar)


def with_calls(
    submit: Submit, grammar: Grammar, checked: str, formats: ChatFormats, max_bytes: int, breadcrumb: Breadcrumb
) -> tuple[str, Grammar | None]:
    """A checked grammar as the one of the answer, and a grammar of tool calls beside it, to be checked too. Raises
    RequestRejected."""
    rejected: RequestRejected | None = None
    outcome, calls = "", None
    with breadcrumb.at(submit.request_id, submit.attempt):  # a refusal that left this block would leave the breadcrumb
        try:
            outcome = as_answer(submit, grammar, checked, formats)
            calls = calls_beside(submit, formats, max_bytes)
        except RequestRejected as rejection:
            rejected = rejection
    if rejected is not None:
        raise rejected
    return outcome, calls
