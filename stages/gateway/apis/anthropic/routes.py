"""The routes of Anthropic's Messages API."""

from pipeline.stages.gateway.apis.anthropic.bodies import MESSAGES_UNSUPPORTED_FIELDS, CountTokensBody, MessagesBody
from pipeline.stages.gateway.apis.anthropic.parsing import parse_count_tokens, parse_messages
from pipeline.stages.gateway.apis.anthropic.reply import counted
from pipeline.stages.gateway.apis.anthropic.types import CountTokensReply, MessageEvent, MessageReply
from pipeline.stages.gateway.http.route import CHAT, MODEL, Route

ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        "messages",
        "A reply to a chat, as in Anthropic's API.",
        MessagesBody,
        MESSAGES_UNSUPPORTED_FIELDS,
        MessageReply,
        MessageEvent,
        opens_request=True,
        tag="Text",
        parse=parse_messages,
        example=MODEL | CHAT | {"max_tokens": 8, "temperature": 0},
        has_typed_events=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "count_tokens",
        "The number of prompt tokens of a chat, as in Anthropic's API.",
        CountTokensBody,
        MESSAGES_UNSUPPORTED_FIELDS,
        CountTokensReply,
        opens_request=True,
        tag="Text",
        parse=parse_count_tokens,
        whole=counted,
        example=MODEL | CHAT,
    ),
)
