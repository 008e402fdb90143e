"""Errors of requests that were opened, with `param` as the client named the field.

The stages behind the gateway see one prompt and one name for each field. A client may have sent several prompts, or
fields of another name or in another object.
"""

import re
from http import HTTPStatus

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
from pipeline.stages.gateway.open_requests.request import Request

_PROMPT_PARAM = re.compile(r"prompt((?:\[\d+\])?)")


def rejection_error(prompt_request: PromptRequest, failure: m.Failure) -> ApiError:
    """A failure that ingest or schedule reported."""
    param = _client_param(prompt_request, failure.param)
    message = failure.message.replace(f"'{failure.param}", f"'{param}", 1)
    return ApiError(failure.status, message, param, failure.code)


def sequence_error(prompt_request: PromptRequest, error: str) -> ApiError:
    """A sequence ended with an error: 400 if the client's fields exclude every token or its grammar failed, else
    500."""
    options = prompt_request.submit.options
    if error.startswith(m.NOTHING_LEFT):
        param = "allowed_token_ids" if options.allowed_ids else "bad_words" if options.bad_words else None
        return ApiError(HTTPStatus.BAD_REQUEST, error, sampling_param(prompt_request.request, param), "nothing_left")
    if error.startswith(m.GRAMMAR_FAILED):
        grammar = prompt_request.request.parsed.options.grammar
        param = None if grammar is None else _client_param(prompt_request, grammar.param)
        return ApiError(HTTPStatus.BAD_REQUEST, error, param, "invalid_grammar")
    if error.endswith(m.DIED_OF_REQUEST):
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, error, code="stage_died")
    message = "the server could not finish this request" + (f": {error}" if error else "")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message)


def sampling_param(request: Request, param: str | None) -> str | None:
    """A sampling field, as the client names it."""
    return None if param is None else request.parsed.dialect.field(param)


def _client_param(prompt_request: PromptRequest, param: str | None) -> str | None:
    request = prompt_request.request
    if param == "max_tokens":
        return request.parsed.max_tokens_param
    if param is not None and (match := _PROMPT_PARAM.fullmatch(param)):
        index, num = request.prompt_requests.index(prompt_request), len(request.prompt_requests)
        return f"{request.parsed.dialect.prompt_name(request.parsed.prompt_param, index, num)}{match[1]}"
    return sampling_param(request, param)
