"""The route of token ids in, token ids out."""

from pipeline.stages.gateway.apis.tokens.parsing import GENERATE_UNSUPPORTED_FIELDS, GenerateBody, parse_tokens_only
from pipeline.stages.gateway.apis.tokens.reply import GenerateChunk, GenerateReply
from pipeline.stages.gateway.http.route import Route

ROUTES = (
    Route(
        "POST",
        "/inference/v1/generate",
        "generate",
        "Token ids in, token ids out.",
        GenerateBody,
        GENERATE_UNSUPPORTED_FIELDS,
        GenerateReply,
        GenerateChunk,
        opens_request=True,
        tag="Tokens",
        parse=parse_tokens_only,
        example={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0}},
    ),
)
