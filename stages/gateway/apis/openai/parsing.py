"""Parses and checks the bodies of chats, completions and requests about prompts only. Pure: as build.py."""

import msgspec

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.reply import CHAT, COMPLETION
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.bodies import (
    CHAT_UNSUPPORTED_FIELDS,
    COMPLETION_UNSUPPORTED_FIELDS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    with_unsupported,
)
from pipeline.stages.gateway.parsing.build import (
    chat_num_top,
    check_model,
    check_num_messages,
    default_completion_tokens,
    details_of,
    parsed_request_of,
    prompt_only,
    with_reply,
)
from pipeline.stages.gateway.parsing.chat.conversation import (
    chat_prompt,
    given_of_chat,
    num_parts,
)
from pipeline.stages.gateway.parsing.chat.reasoning_budget import with_aliases
from pipeline.stages.gateway.parsing.chat.tools import custom_names, left_out_types
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.fill_in import fill_in_tokens
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits, shown_types
from pipeline.stages.gateway.parsing.prompt_fields import (
    Prompts,
    most_ids,
    num_prompts,
    packed,
    prompts_of,
    require_prompt,
)
from pipeline.stages.gateway.parsing.token_detail_options import check_num_top
from pipeline.text.formats.chat_formats import ChatFormats

_chats = msgspec.json.Decoder(with_unsupported(ChatBody, CHAT_UNSUPPORTED_FIELDS))
_tokenizes = msgspec.json.Decoder(TokenizeBody)
_detokenizes = msgspec.json.Decoder(DetokenizeBody)
_completions = msgspec.json.Decoder(with_unsupported(CompletionBody, COMPLETION_UNSUPPORTED_FIELDS))


def read_chat(body: bytes) -> ChatBody:
    """Decode a body. Raises ApiError."""
    return decode(_chats, body, CHAT_UNSUPPORTED_FIELDS)


def read_completion(body: bytes) -> CompletionBody:
    """Decode a body. Raises ApiError."""
    return decode(_completions, body, COMPLETION_UNSUPPORTED_FIELDS)


def parse_chat(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /v1/chat/completions. Raises ApiError."""
    return chat_request_of(read_chat(body), limits)


def chat_request_of(chat: ChatBody, limits: RequestLimits) -> ParsedRequest:
    """Check a body of POST /v1/chat/completions. Raises ApiError."""

    chat, images = with_aliases(chat), limits.images()

    def prompts() -> list[m.Prompt]:
        check_num_messages(num_parts(chat.messages), limits)
        return [chat_prompt(chat, chat.messages, limits.caps, images)]

    details = details_of(chat, chat_num_top(chat, limits), limits)
    if chat.max_completion_tokens is None:
        parsed = parsed_request_of(chat, 1, prompts, chat.max_tokens, limits, CHAT, details=details, images=images)
    else:
        parsed = parsed_request_of(
            chat,
            1,
            prompts,
            chat.max_completion_tokens,
            limits,
            CHAT,
            max_tokens_param="max_completion_tokens",
            details=details,
            images=images,
        )
    parsed = with_reply(
        _with_role(parsed, echo=bool(chat.echo)),
        limits,
        shows_specials=chat.skip_special_tokens is False,
        with_reasoning=chat.include_reasoning is not False,
    )
    if left_out := left_out_types(chat.tools):
        parsed = msgspec.structs.replace(parsed, left_out=shown_types(left_out))
    if parsed.reply is None or not (custom := custom_names(chat.tools)):
        return parsed
    return msgspec.structs.replace(parsed, reply=msgspec.structs.replace(parsed.reply, custom=custom))


def _with_role(parsed: ParsedRequest, *, echo: bool) -> ParsedRequest:
    """Add the reply's role, and the text to echo. As in vLLM, a reply without a generation prompt has the role of the
    last message, and the last message is echoed if its role is the reply's."""
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.ChatPrompt)
    last = prompt.messages[-1]
    role = "assistant" if prompt.add_generation_prompt else last.role
    echoed = (last.content or "") if echo and last.role == role else ""
    return msgspec.structs.replace(parsed, reply_role=role, echoed=echoed)


def parse_completion(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /v1/completions. Raises ApiError."""
    completion = read_completion(body)
    prompt = require_prompt(completion.prompt, may_be_empty=bool(completion.suffix))
    max_tokens = default_completion_tokens(limits) if completion.max_tokens is None else completion.max_tokens
    echo = bool(completion.echo)
    if max_tokens == 0 and not echo:
        raise invalid("max_tokens", "'max_tokens' must be an integer >= 1, unless echo is true", "invalid_value")
    if echo and completion.truncate_prompt_tokens is not None:
        message = "'truncate_prompt_tokens' is not allowed together with echo, which returns the whole prompt"
        raise invalid("truncate_prompt_tokens", message)
    if completion.suffix:
        prompt = _with_suffix(completion, prompt, limits.formats)
    num_top = check_num_top("logprobs", completion.logprobs, limits.caps)
    parsed = parsed_request_of(
        completion,
        num_prompts(prompt),
        lambda: prompts_of(prompt, most_ids(completion.truncate_prompt_tokens, limits.max_prompt_tokens)),
        max_tokens,
        limits,
        COMPLETION,
        best_of=completion.best_of,
        details=details_of(completion, num_top, limits, echo=echo),
    )
    return _with_echo(parsed) if echo else parsed


def _with_suffix(completion: CompletionBody, prompt: Prompts, formats: ChatFormats) -> Prompts:
    """The prompts of a body with a suffix: the output fills in the middle. Raises ApiError."""
    tokens, suffix = fill_in_tokens(formats.added, "suffix"), completion.suffix or ""
    if completion.echo:
        raise invalid("echo", "'echo' is not allowed together with 'suffix'", "invalid_value")
    if completion.truncate_prompt_tokens is not None:  # it could cut the tokens that announce prefix and suffix
        message = "'truncate_prompt_tokens' is not allowed together with 'suffix'"
        raise invalid("truncate_prompt_tokens", message, "invalid_value")
    if isinstance(prompt, str):
        return tokens.prompt(prompt, suffix)
    texts = [one for one in prompt if isinstance(one, str)]
    if len(texts) < len(prompt):
        raise invalid("prompt", "'prompt' must be a string or strings if there is a 'suffix'", "invalid_type")
    return [tokens.prompt(text, suffix) for text in texts]


def _with_echo(parsed: ParsedRequest) -> ParsedRequest:
    """Add the prompt before the output. Logprobs of the prompt alone need one step of the model."""
    options = msgspec.structs.replace(
        parsed.prompt_options,
        with_text=isinstance(parsed.prompts[0], m.IdsPrompt),
    )
    parsed = msgspec.structs.replace(parsed, echo=True, prompt_options=options)
    if parsed.options.max_tokens == 0 and parsed.details.prompt_logprobs_num_top >= 0:
        one = msgspec.structs.replace(parsed.options, max_tokens=1)
        return msgspec.structs.replace(parsed, options=one, hides_output=True)
    return parsed


def parse_tokenize(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /tokenize. Raises ApiError."""
    decoded = decode(_tokenizes, body, {})
    check_model(decoded.model, limits)
    prompt: m.Prompt
    images = limits.images()
    match decoded.prompt, decoded.messages:
        case str(text), None:
            if (name := given_of_chat(decoded)) is not None:
                raise invalid(name, f"'{name}' is only allowed together with 'messages'")
            prompt = m.TextPrompt(text)
        case None, list(messages):
            prompt = chat_prompt(decoded, messages, limits.caps, images)
        case None, None:
            raise invalid("prompt", "'prompt' or 'messages' is required")
        case _:
            raise invalid("messages", "'messages' is not allowed together with 'prompt'")
    options = m.PromptOptions(
        decoded.add_special_tokens, any_length=True, with_token_strs=bool(decoded.return_token_strs)
    )
    dialect = CHAT if isinstance(prompt, m.ChatPrompt) else COMPLETION
    return prompt_only(prompt, options, "prompt", limits, dialect, images.found)


def parse_detokenize(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /detokenize. Raises ApiError."""
    decoded = decode(_detokenizes, body, {})
    check_model(decoded.model, limits)
    options = m.PromptOptions(any_length=True, with_text=True)
    return prompt_only(m.IdsPrompt(packed(decoded.tokens)), options, "tokens", limits, COMPLETION)
