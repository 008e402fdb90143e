"""The routes of Cohere's embeddings. Its reranking is in apis/scoring."""

from typing import Any

from pipeline.stages.gateway.apis.cohere.parsing import (
    COHERE_UNSUPPORTED_FIELDS,
    CohereEmbedBody,
    OldCohereEmbedBody,
    parse_embed,
    parse_old_embed,
)
from pipeline.stages.gateway.apis.cohere.reply import CohereEmbedReply, OldCohereEmbedReply
from pipeline.stages.gateway.http.route import MODEL, Parse, Route


def _embed(path: str, handler: str, summary: str, body: Any, reply: Any, parse: Parse) -> Route:
    return Route(
        "POST",
        path,
        handler,
        summary,
        body,
        COHERE_UNSUPPORTED_FIELDS,
        reply,
        opens_request=True,
        tag="Vectors",
        parse=parse,
        example=MODEL | {"texts": ["a text", "and another"], "embedding_types": ["float"]},
    )


ROUTES = (
    _embed(
        "/v2/embed",
        "v2_embed",
        "Embeddings of texts, as in Cohere's API.",
        CohereEmbedBody,
        CohereEmbedReply,
        parse_embed,
    ),
    _embed(
        "/v1/embed",
        "v1_embed",
        "The same in the form of Cohere's older clients.",
        OldCohereEmbedBody,
        OldCohereEmbedReply,
        parse_old_embed,
    ),
)
