"""The route of embeddings."""

from pipeline.stages.gateway.apis.embeddings.parsing import (
    EMBEDDINGS_UNSUPPORTED_FIELDS,
    EmbeddingsBody,
    parse_embeddings,
)
from pipeline.stages.gateway.apis.embeddings.reply import EmbeddingsReply
from pipeline.stages.gateway.http.route import MODEL, Route

ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        "embeddings",
        "Embeddings of texts or of token ids.",
        EmbeddingsBody,
        EMBEDDINGS_UNSUPPORTED_FIELDS,
        EmbeddingsReply,
        opens_request=True,
        tag="Vectors",
        parse=parse_embeddings,
        example=MODEL | {"input": ["a text", "and another"]},
    ),
)
