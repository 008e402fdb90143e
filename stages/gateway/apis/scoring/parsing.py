"""Parses the bodies of POST /score and /rerank. Pure."""

import functools

import msgspec

from pipeline.http_server import request_ids
from pipeline.stages.gateway.apis.scoring.bodies import (
    SCORE_NAMES,
    SCORING_UNSUPPORTED_FIELDS,
    Document,
    RerankBody,
    ScoreBody,
)
from pipeline.stages.gateway.apis.scoring.reply import RerankDialect, ScoreDialect
from pipeline.stages.gateway.apis.scoring.scores import pairing_of, score_request
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.bodies import with_unsupported
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.pooling import check_num_inputs

_scores = msgspec.json.Decoder(with_unsupported(ScoreBody, SCORING_UNSUPPORTED_FIELDS))
_reranks = msgspec.json.Decoder(with_unsupported(RerankBody, SCORING_UNSUPPORTED_FIELDS))


def parse_score(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /score. Raises ApiError."""
    decoded = decode(_scores, body, SCORING_UNSUPPORTED_FIELDS)
    names = _names_of(decoded)
    first, second = (_texts(getattr(decoded, name)) for name in names)
    pairing = pairing_of(len(first), decoded.model, limits, decoded.use_activation)
    dialect = ScoreDialect(pairing, names)
    request_id = request_ids.checked(decoded.request_id, "request_id")
    return score_request(decoded, dialect, pairing, first, second, names, limits, request_id=request_id)


def parse_rerank(body: bytes, limits: RequestLimits, *, is_cohere: bool = False) -> ParsedRequest:
    """Read the body of POST /rerank, or Cohere's of /v2/rerank, whose defaults differ: documents are truncated, and not
    returned. Raises ApiError."""
    decoded = decode(_reranks, body, SCORING_UNSUPPORTED_FIELDS)
    check_num_inputs(len(decoded.documents), "documents", limits)
    if is_cohere and decoded.truncate_prompt_tokens is None:
        decoded.truncate_prompt_tokens = -1
    texts = [one.text if isinstance(one, Document) else one for one in decoded.documents]
    returns = not is_cohere if decoded.return_documents is None else decoded.return_documents
    pairing = pairing_of(1, decoded.model, limits, decoded.use_activation)
    names = "query", "documents"
    dialect = RerankDialect(pairing, names, texts if returns else None, decoded.top_n or len(texts))
    prompts = limits.pooler.prompts
    return score_request(
        decoded,
        dialect,
        pairing,
        [decoded.query],
        texts,
        names,
        limits,
        request_id=request_ids.checked(decoded.request_id, "request_id"),
        prefixes=(prompts.get("query", ""), prompts.get("document", "")),
    )


parse_cohere_rerank = functools.partial(parse_rerank, is_cohere=True)
"""Reads the body of POST /v2/rerank. Raises ApiError."""


def _names_of(decoded: ScoreBody) -> tuple[str, str]:
    """The names of the two fields with texts. Raises ApiError."""
    given = {name for names in SCORE_NAMES for name in names if getattr(decoded, name) is not None}
    found = next((names for names in SCORE_NAMES if given == {*names}), None)
    if found is not None:
        return found
    pairs = "; ".join(f"'{first}' and '{second}'" for first, second in SCORE_NAMES)
    half = next((names for names in SCORE_NAMES if given and given < {*names}), None)
    missing = None if half is None else next(name for name in half if name not in given)
    if missing is not None:
        raise invalid(missing, f"'{missing}' is required with '{next(iter(given))}'")
    raise invalid("text_1", f"the texts must be in one of these pairs of fields: {pairs}")


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
