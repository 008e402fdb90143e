"""The table of HTTP routes, from which the application and the API description are built.

The page of the route's API in docs/http/ has its examples, under its `heading`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.http_server.abort_body import AbortBody
from pipeline.http_server.apis.openai import ApiFamily
from pipeline.http_server.apis.table import family_of
from pipeline.stages.gateway.admin.abort_requests import Aborted
from pipeline.stages.gateway.admin.adapters import LoadAdapterBody, UnloadAdapterBody
from pipeline.stages.gateway.admin.health import HealthBody
from pipeline.stages.gateway.admin.pipeline_state import PipelineState
from pipeline.stages.gateway.admin.reset_prefix_cache import Reset
from pipeline.stages.gateway.admin.server_info import (
    ModelCard,
    ModelList,
    ServerInfo,
    ServerLoad,
    TokenizerInfo,
    Version,
)
from pipeline.stages.gateway.apis.anthropic.bodies import MESSAGES_UNSUPPORTED_FIELDS, CountTokensBody, MessagesBody
from pipeline.stages.gateway.apis.anthropic.types import CountTokensReply, MessageEvent, MessageReply
from pipeline.stages.gateway.apis.embeddings.parsing import EMBEDDINGS_UNSUPPORTED_FIELDS, EmbeddingsBody
from pipeline.stages.gateway.apis.embeddings.reply import EmbeddingsReply
from pipeline.stages.gateway.apis.infill.parsing import INFILL_UNSUPPORTED_FIELDS, InfillBody
from pipeline.stages.gateway.apis.infill.reply import InfillReply
from pipeline.stages.gateway.apis.ollama import bodies as ob
from pipeline.stages.gateway.apis.ollama import types as ot
from pipeline.stages.gateway.apis.openai.invocations import InvocationBody
from pipeline.stages.gateway.apis.openai.rendering import Rendered
from pipeline.stages.gateway.apis.openai.reply import Detokenized, Tokenized
from pipeline.stages.gateway.apis.openai.types import ChatChunk, ChatReply, TextReply
from pipeline.stages.gateway.apis.responses.body import RESPONSES_UNSUPPORTED_FIELDS, ResponsesBody
from pipeline.stages.gateway.apis.responses.types import ItemList, ResponseDeleted, ResponseEvent, ResponseObject
from pipeline.stages.gateway.apis.tokens.parsing import GENERATE_UNSUPPORTED_FIELDS, GenerateBody
from pipeline.stages.gateway.apis.tokens.reply import GenerateChunk, GenerateReply
from pipeline.stages.gateway.parsing.bodies import (
    CHAT_UNSUPPORTED_FIELDS,
    COMPLETION_UNSUPPORTED_FIELDS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str
    handler: str
    """The method of `app.Api`, of `ResponsesApi` below /v1/responses, or of `OllamaApi` below /api"""
    summary: str
    body: Any = None
    """Type of the JSON body"""
    unsupported_fields: Mapping[str, tuple[Any, ...]] = {}
    """Unsupported fields, and the values besides null that are accepted for them"""
    reply: Any = None
    """Type of the JSON response, or types of which it is one; None for text"""
    event: Any = None
    """Type of the events, if the response may be a stream; a union if their `event` line names the type,
    several if it doesn't"""
    opens_request: bool = False
    """It opens a request in the table."""
    is_admin: bool = False
    """It is for the operator's programs, which have no key."""

    @property
    def family(self) -> ApiFamily:
        """Has the shape of its errors."""
        return family_of(self.path)

    @property
    def heading(self) -> str:
        """Its section in a page of docs/http/"""
        return f"## {self.method} {self.path}".removesuffix("/{model}")

    @property
    def resource(self) -> str:
        """The path for aiohttp: a model's name may have slashes."""
        return self.path.replace("{model}", "{model:.+}")


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "A reply to a chat.",
        ChatBody,
        CHAT_UNSUPPORTED_FIELDS,
        ChatReply,
        ChatChunk,
        opens_request=True,
    ),
    Route(
        "POST",
        "/v1/responses",
        "create_response",
        "A response to a text or to items of a conversation.",
        ResponsesBody,
        RESPONSES_UNSUPPORTED_FIELDS,
        ResponseObject,
        ResponseEvent,
        opens_request=True,
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        "get_response",
        "A stored response.",
        reply=ResponseObject,
        event=ResponseEvent,
    ),
    Route("DELETE", "/v1/responses/{response_id}", "delete_response", "Deletes a response.", reply=ResponseDeleted),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "cancel_response",
        "Cancels a background response.",
        reply=ResponseObject,
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "list_input_items",
        "The items of the conversation before a response.",
        reply=ItemList,
    ),
    Route(
        "POST",
        "/v1/completions",
        "completions",
        "Completions of texts or of token ids.",
        CompletionBody,
        COMPLETION_UNSUPPORTED_FIELDS,
        TextReply,
        TextReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/v1/messages",
        "messages",
        "A reply to a chat, as in Anthropic's API.",
        MessagesBody,
        MESSAGES_UNSUPPORTED_FIELDS,
        MessageReply,
        MessageEvent,
        opens_request=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "count_tokens",
        "The number of prompt tokens of a chat, as in Anthropic's API.",
        CountTokensBody,
        MESSAGES_UNSUPPORTED_FIELDS,
        CountTokensReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        "embeddings",
        "Embeddings of texts or of token ids.",
        EmbeddingsBody,
        EMBEDDINGS_UNSUPPORTED_FIELDS,
        EmbeddingsReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/v1/chat/completions/render",
        "render_chat",
        "The prompt of a chat, without running it.",
        ChatBody,
        CHAT_UNSUPPORTED_FIELDS,
        Rendered,
        opens_request=True,
    ),
    Route(
        "POST",
        "/v1/completions/render",
        "render_completion",
        "The prompts of completions, without running them.",
        CompletionBody,
        COMPLETION_UNSUPPORTED_FIELDS,
        list[Rendered],
        opens_request=True,
    ),
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
    ),
    Route(
        "POST",
        "/api/chat",
        "ollama_chat",
        "A reply to a chat, as in Ollama's API.",
        ob.OllamaChatBody,
        ob.OLLAMA_UNSUPPORTED_FIELDS,
        ot.OllamaChatReply,
        ot.OllamaChatReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/api/generate",
        "ollama_generate",
        "A reply to a text, as in Ollama's API.",
        ob.OllamaGenerateBody,
        ob.OLLAMA_GENERATE_UNSUPPORTED_FIELDS,
        ot.OllamaGenerateReply,
        ot.OllamaGenerateReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/api/embed",
        "ollama_embed",
        "Embeddings of texts, as in Ollama's API.",
        ob.OllamaEmbedBody,
        reply=ot.OllamaEmbedReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/api/embeddings",
        "ollama_embeddings",
        "The embedding of a text, as in Ollama's older API.",
        ob.OllamaEmbeddingsBody,
        reply=ot.OllamaEmbeddingsReply,
        opens_request=True,
    ),
    Route("GET", "/api/tags", "ollama_tags", "The model, in Ollama's list.", reply=ot.OllamaModelList),
    Route("GET", "/api/ps", "ollama_ps", "The model, in Ollama's list of loaded ones.", reply=ot.OllamaRunningList),
    Route(
        "POST",
        "/api/show",
        "ollama_show",
        "Facts of the model, as in Ollama's API.",
        ob.OllamaShowBody,
        reply=ot.OllamaShowReply,
    ),
    Route("GET", "/api/version", "ollama_version", "The version of Ollama's API.", reply=ot.OllamaVersion),
    Route("GET", "/v1/models", "models", "The model, in a list.", reply=ModelList),
    Route("GET", "/v1/models/{model}", "model", "The model.", reply=ModelCard),
    Route(
        "POST",
        "/tokenize",
        "tokenize",
        "The token ids of a text or a chat.",
        TokenizeBody,
        reply=Tokenized,
        opens_request=True,
    ),
    Route(
        "POST",
        "/detokenize",
        "detokenize",
        "The text of token ids.",
        DetokenizeBody,
        reply=Detokenized,
        opens_request=True,
    ),
    Route("GET", "/tokenizer_info", "tokenizer_info", "The tokenizer and the chat template.", reply=TokenizerInfo),
    Route(
        "POST",
        "/infill",
        "infill",
        "The text between a prefix and a suffix, as in llama.cpp.",
        InfillBody,
        INFILL_UNSUPPORTED_FIELDS,
        InfillReply,
        InfillReply,
        opens_request=True,
    ),
    Route(
        "POST",
        "/invocations",
        "invocations",
        "A chat, completions or embeddings, by the fields of the body: for SageMaker.",
        InvocationBody,
        reply=(ChatReply, TextReply, EmbeddingsReply),
        event=(ChatChunk, TextReply),
        opens_request=True,
    ),
    Route("POST", "/abort_requests", "abort_requests", "Aborts requests by their ids.", AbortBody, reply=Aborted),
    Route(
        "POST", "/reset_prefix_cache", "reset_prefix_cache", "Drops all cached blocks of the prefix cache.", reply=Reset
    ),
    Route(
        "POST",
        "/v1/load_lora_adapter",
        "load_lora_adapter",
        "Loads a LoRA adapter, if lora.runtime_loading is set.",
        LoadAdapterBody,
        is_admin=True,
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        "unload_lora_adapter",
        "Unloads a LoRA adapter, if lora.runtime_loading is set.",
        UnloadAdapterBody,
        is_admin=True,
    ),
    Route("GET", "/load", "load", "Number of open requests, and the limits.", reply=ServerLoad),
    Route("GET", "/pipeline", "pipeline", "The stages, the KV cache and the latest requests.", reply=PipelineState),
    Route("GET", "/health", "health", "The state of each process.", reply=HealthBody, is_admin=True),
    Route(
        "GET", "/live", "live", "200 while the server runs, also while it recovers: for liveness probes.", is_admin=True
    ),
    Route("GET", "/ping", "ping", "200 if the server takes requests: for SageMaker.", is_admin=True),
    Route("POST", "/ping", "post_ping", "As GET /ping."),
    Route("GET", "/metrics", "metrics", "Metrics for Prometheus.", is_admin=True),
    Route("GET", "/server_info", "server_info", "The settings of the server.", reply=ServerInfo),
    Route("GET", "/version", "version", "The version of the package.", reply=Version),
    Route("GET", "/openapi.json", "openapi", "This API, as OpenAPI 3.1."),
    Route("GET", "/docs", "docs", "This API, as a web page."),
)


def meant_route(method: str, path: str) -> str:
    """The route that a path without /v1, with it twice, or with a slash at its end probably means, as the rest of a
    sentence; empty if there is none."""
    bare = path.rstrip("/").removeprefix("/v1")
    known = {route.path for route in ROUTES if route.method == method}
    meant = next((one for one in (f"/v1{bare}", bare) if one in known and one != path), "")
    return f"; did you mean {meant}?" if meant else ""
