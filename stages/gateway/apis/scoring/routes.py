"""The routes of scores and of reranking."""

from typing import Any

from pipeline.stages.gateway.apis.scoring.bodies import (
    SCORING_UNSUPPORTED_FIELDS,
    RerankBody,
    RerankReply,
    ScoreBody,
    ScoreReply,
)
from pipeline.stages.gateway.apis.scoring.parsing import parse_cohere_rerank, parse_rerank, parse_score
from pipeline.stages.gateway.http.route import MODEL, Parse, Route

SCORE = {"text_1": "What is the capital of Greece?", "text_2": ["Athens is the capital.", "Olives grow there."]}
RERANK = {"query": SCORE["text_1"], "documents": SCORE["text_2"]}


def _route(
    path: str, handler: str, summary: str, body: Any, reply: Any, parse: Parse, example: dict[str, Any]
) -> Route:
    return Route(
        "POST",
        path,
        handler,
        summary,
        body,
        SCORING_UNSUPPORTED_FIELDS,
        reply,
        opens_request=True,
        tag="Vectors",
        parse=parse,
        example=MODEL | example,
    )


def _score(path: str, handler: str) -> Route:
    return _route(path, handler, "Scores of pairs of texts.", ScoreBody, ScoreReply, parse_score, SCORE)


def _rerank(path: str, handler: str, summary: str, parse: Parse = parse_rerank) -> Route:
    return _route(path, handler, summary, RerankBody, RerankReply, parse, RERANK)


ROUTES = (
    _score("/score", "score"),
    _score("/v1/score", "v1_score"),
    _rerank("/rerank", "rerank", "Documents in the order of their relevance to a query."),
    _rerank("/v1/rerank", "v1_rerank", "The same, where Jina's clients and Cohere's older ones look for it."),
    _rerank("/v2/rerank", "v2_rerank", "The same, as in Cohere's API: documents are cut to fit.", parse_cohere_rerank),
)
