"""Replies of POST /score and /rerank."""

from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.stages.gateway.admission.open_bytes import echo_bytes
from pipeline.stages.gateway.apis.scoring.bodies import (
    Document,
    RerankReply,
    RerankResult,
    ScoreData,
    ScoreReply,
    ScoreUsage,
)
from pipeline.stages.gateway.apis.scoring.scores import Pairing, name_of_text, scores_of
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.large_json import PackedList, encode_large

_encoder = msgspec.json.Encoder()


def usage_of(request: Request) -> ScoreUsage:
    num = request.num_prompt_tokens
    return ScoreUsage(num, num)


@dataclass(frozen=True)
class ScoreDialect(Dialect):
    """/score"""

    pairing: Pairing
    names: tuple[str, str]
    """Of the fields with texts."""

    id_prefix = "score-"
    has_tools = False

    @property
    def prompt_field(self) -> str:  # type: ignore[override]
        return self.names[1]

    def prompt_name(self, param: str, index: int, num: int) -> str:
        return name_of_text(self.pairing, self.names, index, num)

    def whole(self, request: Request) -> bytes:
        scores = scores_of(request, self.pairing)
        data: Any = PackedList(_encoder.encode(ScoreData(index=i, score=one)) for i, one in enumerate(scores))
        reply = ScoreReply(
            id=request.id, created=request.created, model=request.parsed.model, data=data, usage=usage_of(request)
        )
        return encode_large(reply)


@dataclass(frozen=True)
class RerankDialect(ScoreDialect):
    """/rerank, /v1/rerank, /v2/rerank"""

    texts: list[str] | None
    """The documents, if the reply has them."""
    top_n: int

    id_prefix = "rerank-"

    def whole(self, request: Request) -> bytes:
        scores = scores_of(request, self.pairing)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        results: Any = PackedList(_encoder.encode(self._result(index, scores[index])) for index in best)
        reply = RerankReply(id=request.id, model=request.parsed.model, usage=usage_of(request), results=results)
        return encode_large(reply)

    def _result(self, index: int, score: float) -> RerankResult:
        document = None if self.texts is None else Document(self.texts[index])
        return RerankResult(index=index, relevance_score=score, document=document)

    def reply_bytes(self, *, stream: bool) -> int:
        return 0 if self.texts is None else echo_bytes(self.texts)
