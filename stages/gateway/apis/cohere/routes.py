"""The route of Cohere's embeddings. Its reranking is in apis/scoring."""

from pipeline.stages.gateway.apis.cohere.parsing import COHERE_UNSUPPORTED_FIELDS, CohereEmbedBody, parse_embed
from pipeline.stages.gateway.apis.cohere.reply import CohereEmbedReply
from pipeline.stages.gateway.http.route import MODEL, Route

ROUTES = (
    Route(
        "POST",
        "/v2/embed",
        "v2_embed",
        "Embeddings of texts, as in Cohere's API.",
        CohereEmbedBody,
        COHERE_UNSUPPORTED_FIELDS,
        CohereEmbedReply,
        opens_request=True,
        tag="Vectors",
        parse=parse_embed,
        example=MODEL | {"texts": ["a text", "and another"], "embedding_types": ["float"]},
    ),
)
