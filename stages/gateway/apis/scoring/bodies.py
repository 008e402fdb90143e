"""Bodies of POST /score and /rerank, with vLLM's and Jina's names."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.conversation import Kwargs
from pipeline.client.protocol.request import Instruction, UseActivation
from pipeline.stages.gateway.parsing.pooling import PoolingBody

Texts = Annotated[str | list[str], Meta(description="A text or texts.")]

SCORE_NAMES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""The names of the two fields with texts. One text is scored with each of the second; or both have as many."""


class ScoringBody(PoolingBody, kw_only=True):
    """Fields of both."""

    use_activation: UseActivation | None = None
    instruction: Instruction | None = None
    chat_template_kwargs: Kwargs = Raw()


class ScoreBody(ScoringBody, kw_only=True):
    """POST /score. The texts have one pair of names: text_1 and text_2, data_1 and data_2, queries and documents, or
    queries and items."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class Document(msgspec.Struct):
    """A document as an object. Other fields are ignored."""

    text: str


class RerankBody(ScoringBody, kw_only=True):
    """POST /rerank"""

    query: str
    documents: Annotated[list[str | Document], Meta(description="Texts, or objects with `text`.")]
    top_n: Annotated[int, Meta(ge=0, description="Return this many, the best ones; default all, as 0.")] | None = None
    return_documents: (
        Annotated[bool, Meta(description="Whether results have the texts; default true, but false for /v2/rerank.")]
        | None
    ) = None


SCORING_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "mm_processor_kwargs": ({},),
    "max_chunks_per_doc": (1,),
    "max_tokens_per_doc": (),
    "rank_fields": (["text"],),
}
"""vLLM's and Cohere's fields that are not supported, and the values, besides null, at which they change nothing."""


class ScoreData(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Of the second text.")]
    object: str = "score"
    score: Annotated[
        float,
        Meta(description="A cross-encoder's score, mostly from 0 to 1; of other models the cosine, from -1 to 1."),
    ]


class ScoreUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class ScoreReply(msgspec.Struct, kw_only=True):
    """POST /score"""

    id: str
    object: Annotated[str, Meta(description="list")] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: ScoreUsage


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: Annotated[int, Meta(description="Of the document in the request.")]
    relevance_score: Annotated[float, Meta(description="As `score` of /score.")]
    document: Document | None = None


class RerankReply(msgspec.Struct, kw_only=True):
    """POST /rerank"""

    id: str
    model: str
    usage: ScoreUsage
    results: Annotated[list[RerankResult], Meta(description="The best first.")]
