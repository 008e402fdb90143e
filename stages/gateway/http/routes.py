"""Every route over HTTP: what it does, what it takes, what it gives. The application is built from this table.

The examples of a route are those of docs/http.md under its `heading`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.stages.gateway.admin.aborts import AbortBody, Aborted
from pipeline.stages.gateway.admin.health import HealthBody
from pipeline.stages.gateway.admin.prefix_cache_resets import Reset
from pipeline.stages.gateway.admin.server_info import Load, ModelCard, ModelList, Version
from pipeline.stages.gateway.parsing.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from pipeline.stages.gateway.replies.embeddings import EMBEDDINGS_NEUTRAL, EmbeddingsBody, EmbeddingsReply
from pipeline.stages.gateway.replies.rendering import Rendered
from pipeline.stages.gateway.replies.responses import Detokenized, Tokenized
from pipeline.stages.gateway.replies.tokens_only import GENERATE_NEUTRAL, GenerateBody, GenerateChunk, GenerateReply
from pipeline.stages.gateway.replies.types import ChatChunk, ChatReply, TextReply


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str
    does: str
    """The method of `app.Api`"""
    summary: str
    body: Any = None
    """Type of the request's body, JSON"""
    neutral: Mapping[str, tuple[Any, ...]] = {}
    """Fields that it may have besides, and the values, besides null, at which they are no error"""
    reply: Any = None
    """Type of the response's body, JSON; None is text"""
    event: Any = None
    """Type of the events, where the response may be a stream"""
    is_call: bool = False
    """It takes a place among those that are open."""
    is_admin: bool = False
    """An operator's own programs ask it, who have no key."""

    @property
    def heading(self) -> str:
        """Its section of docs/http.md"""
        return f"## {self.method} {self.path}".removesuffix("/{model}")

    @property
    def resource(self) -> str:
        """The path as aiohttp has it: a model's name may have slashes."""
        return self.path.replace("{model}", "{model:.+}")


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "A reply to a chat.",
        ChatBody,
        CHAT_NEUTRAL,
        ChatReply,
        ChatChunk,
        is_call=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        "completions",
        "The continuation of a text, of texts, or of token ids.",
        CompletionBody,
        COMPLETION_NEUTRAL,
        TextReply,
        TextReply,
        is_call=True,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        "embeddings",
        "Vectors of texts or of token ids.",
        EmbeddingsBody,
        EMBEDDINGS_NEUTRAL,
        EmbeddingsReply,
        is_call=True,
    ),
    Route(
        "POST",
        "/v1/chat/completions/render",
        "render_chat",
        "What a chat would be to the model.",
        ChatBody,
        CHAT_NEUTRAL,
        Rendered,
        is_call=True,
    ),
    Route(
        "POST",
        "/v1/completions/render",
        "render_completion",
        "What prompts would be to the model.",
        CompletionBody,
        COMPLETION_NEUTRAL,
        list[Rendered],
        is_call=True,
    ),
    Route(
        "POST",
        "/inference/v1/generate",
        "generate",
        "Token ids in, token ids out.",
        GenerateBody,
        GENERATE_NEUTRAL,
        GenerateReply,
        GenerateChunk,
        is_call=True,
    ),
    Route("GET", "/v1/models", "models", "The model, in a list.", reply=ModelList),
    Route("GET", "/v1/models/{model}", "model", "The model.", reply=ModelCard),
    Route(
        "POST",
        "/tokenize",
        "tokenize",
        "The ids of a text or a chat.",
        TokenizeBody,
        reply=Tokenized,
        is_call=True,
    ),
    Route("POST", "/detokenize", "detokenize", "The text of ids.", DetokenizeBody, reply=Detokenized, is_call=True),
    Route("POST", "/abort_requests", "abort_requests", "Ends calls by their ids.", AbortBody, reply=Aborted),
    Route("POST", "/reset_prefix_cache", "reset_prefix_cache", "Forgets what prompts could share.", reply=Reset),
    Route("GET", "/load", "load", "How much is in work, and how much may be.", reply=Load),
    Route("GET", "/health", "health", "How each process is.", reply=HealthBody, is_admin=True),
    Route("GET", "/metrics", "metrics", "Counts and times for Prometheus.", is_admin=True),
    Route("GET", "/version", "version", "The version of the package.", reply=Version),
    Route("GET", "/openapi.json", "openapi", "This API, as OpenAPI 3.1."),
    Route("GET", "/docs", "docs", "This API, as a page for people."),
)
