"""The routes of OpenAI's Responses API."""

from pipeline.stages.gateway.apis.responses.body import RESPONSES_UNSUPPORTED_FIELDS, ResponsesBody
from pipeline.stages.gateway.apis.responses.types import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    MAX_NUMBER_DIGITS,
    ItemList,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from pipeline.stages.gateway.http.route import MODEL, Route

ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        "create_response",
        "A response to a text or to items of a conversation.",
        ResponsesBody,
        RESPONSES_UNSUPPORTED_FIELDS,
        ResponseObject,
        ResponseEvent,
        opens_request=True,
        tag="Text",
        example=MODEL | {"input": "What is the capital of Greece?", "temperature": 0, "max_output_tokens": 8},
        has_typed_events=True,
        failure_events="`error` and `response.failed`",
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        "get_response",
        "A stored response.",
        reply=ResponseObject,
        event=ResponseEvent,
        tag="Text",
        has_typed_events=True,
        failure_events="`error` and `response.failed`",
        queries=[
            {
                "name": "stream",
                "in": "query",
                "description": "true: the events of a response that was created with background and stream.",
                "schema": {"type": "boolean", "default": False},
            },
            {
                "name": "starting_after",
                "in": "query",
                "description": "With stream: the sequence_number of the event before the first one.",
                "schema": {"type": "integer", "minimum": 0, "maximum": 10**MAX_NUMBER_DIGITS - 1},
            },
        ],
    ),
    Route(
        "DELETE",
        "/v1/responses/{response_id}",
        "delete_response",
        "Deletes a response.",
        reply=ResponseDeleted,
        tag="Text",
    ),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "cancel_response",
        "Cancels a background response.",
        reply=ResponseObject,
        tag="Text",
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "list_input_items",
        "The items of the conversation before a response.",
        reply=ItemList,
        tag="Text",
        queries=[
            {
                "name": "limit",
                "in": "query",
                "description": "Number of items.",
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            },
            {
                "name": "order",
                "in": "query",
                "description": "desc: the newest first.",
                "schema": {"enum": ["asc", "desc"], "default": "desc"},
            },
            {
                "name": "after",
                "in": "query",
                "description": "The id of the item before the first one.",
                "schema": {"type": "string"},
            },
        ],
    ),
)
