"""The routes of labels, and of whatever a model's pooler makes."""

from pipeline.stages.gateway.apis.pooling.bodies import (
    POOLING_UNSUPPORTED_FIELDS,
    ClassifyBody,
    ClassifyReply,
    PoolingReply,
    PoolingTaskBody,
)
from pipeline.stages.gateway.apis.pooling.parsing import parse_classify, parse_pooling
from pipeline.stages.gateway.http.route import MODEL, Route

ROUTES = (
    Route(
        "POST",
        "/classify",
        "classify",
        "Labels of texts, with their probabilities.",
        ClassifyBody,
        POOLING_UNSUPPORTED_FIELDS,
        ClassifyReply,
        opens_request=True,
        tag="Vectors",
        parse=parse_classify,
        example=MODEL | {"input": ["a text", "and another"]},
    ),
    Route(
        "POST",
        "/pooling",
        "pooling",
        "What the model's pooler makes of texts: vectors, or logits, of whole texts or of each token.",
        PoolingTaskBody,
        POOLING_UNSUPPORTED_FIELDS,
        PoolingReply,
        opens_request=True,
        tag="Vectors",
        parse=parse_pooling,
        example=MODEL | {"input": ["a text", "and another"]},
    ),
)
