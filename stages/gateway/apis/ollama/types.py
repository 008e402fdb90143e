"""Types of replies of Ollama's API. UNSET fields are left out. Durations are in nanoseconds."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from pipeline.stages.gateway.apis.openai.types import Assistant
from pipeline.stages.gateway.replies.logprobs import TokenLogprob

DONE_REASONS = ("stop", "length", "abort", "load", "unload")

Model = Annotated[str, Meta(description="The model's name, as in the request.")]
DoneReason = Annotated[
    str,
    Meta(
        description="abort: the request was aborted, or reached its deadline. load, unload: it had no prompt.",
        extra_json_schema={"enum": list(DONE_REASONS)},
    ),
]
Nanoseconds = Annotated[int, Meta(ge=0, description="In nanoseconds.")]
Thinking = Annotated[str, Meta(description="The reasoning before the content.")]
Logprobs = Annotated[list[TokenLogprob], Meta(description="With logprobs: one entry for each token.")]


class OllamaFunction(msgspec.Struct):
    index: Annotated[int, Meta(description="Index of the call in the message.")]
    name: str
    arguments: Annotated[
        Raw,
        Meta(
            description="As the model wrote them; empty if that is not a JSON object.",
            extra_json_schema={"type": "object"},
        ),
    ]


class OllamaToolCall(msgspec.Struct):
    id: str
    function: OllamaFunction


class OllamaReplyMessage(msgspec.Struct, kw_only=True):
    role: Assistant = "assistant"
    content: str = ""
    thinking: Thinking | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class _OllamaReply(msgspec.Struct, kw_only=True):
    model: Model
    created_at: Annotated[str, Meta(description="When the request arrived: RFC 3339, in UTC.")]
    done: Annotated[bool, Meta(description="false: more objects follow.")]
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: Annotated[Nanoseconds, Meta(description="From the arrival to the end.")] | UnsetType = UNSET
    load_duration: Annotated[Nanoseconds, Meta(description="0: the model was loaded before.")] | UnsetType = UNSET
    prompt_eval_count: Annotated[int, Meta(description="Number of prompt tokens.")] | UnsetType = UNSET
    prompt_eval_duration: (
        Annotated[Nanoseconds, Meta(description="From the start of the prefill to the first token.")] | UnsetType
    ) = UNSET
    eval_count: Annotated[int, Meta(description="Number of output tokens.")] | UnsetType = UNSET
    eval_duration: Annotated[Nanoseconds, Meta(description="From the first token to the end.")] | UnsetType = UNSET
    logprobs: Logprobs | UnsetType = UNSET


class OllamaChatReply(_OllamaReply, kw_only=True):
    """POST /api/chat; each object of its stream has the same shape, and the last one has the figures."""

    message: OllamaReplyMessage


class OllamaGenerateReply(_OllamaReply, kw_only=True):
    """POST /api/generate; each object of its stream has the same shape, and the last one has the figures."""

    response: str = ""
    thinking: Thinking | UnsetType = UNSET


class OllamaEmbedReply(msgspec.Struct):
    """POST /api/embed"""

    model: Model
    embeddings: Annotated[list[list[float]], Meta(description="One vector of length 1 for each input.")]
    total_duration: Nanoseconds
    load_duration: Nanoseconds
    prompt_eval_count: Annotated[int, Meta(description="Number of tokens of all inputs.")]


class OllamaEmbeddingsReply(msgspec.Struct):
    """POST /api/embeddings"""

    embedding: Annotated[list[float], Meta(description="A vector of length 1; empty without a prompt.")]


# --------------------------------------------------------------------------------------------------------------- models


class OllamaModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: Annotated[str, Meta(description='"gguf" if most weights have a block format of GGUF, else "safetensors".')]
    family: Annotated[str, Meta(description="The architecture.")]
    families: list[str]
    parameter_size: Annotated[str, Meta(description='Such as "134.5M".')]
    quantization_level: Annotated[str, Meta(description='Format of most weights, such as "Q8_0" or "BF16".')]


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model in /api/tags"""

    name: str
    model: str
    modified_at: Annotated[str, Meta(description="When the server started: RFC 3339, in UTC.")]
    size: Annotated[int, Meta(description="Bytes of the weight files.")]
    digest: Annotated[str, Meta(description="SHA-256 of the model's description.")]
    details: OllamaModelDetails


class OllamaModelList(msgspec.Struct):
    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, kw_only=True):
    """A model in /api/ps"""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    expires_at: Annotated[str, Meta(description="Far in the future: the model stays loaded.")]
    size_vram: Annotated[int, Meta(description="The size if the model is on a GPU; else 0.")]
    context_length: Annotated[int, Meta(description="Longest prompt and output together, in tokens.")]


class OllamaRunningList(msgspec.Struct):
    models: list[OllamaRunningModel]


class OllamaShowReply(msgspec.Struct, kw_only=True):
    """POST /api/show"""

    modelfile: Annotated[str, Meta(description="Empty: there is no Modelfile.")] = ""
    parameters: Annotated[str, Meta(description="Empty: the defaults are Ollama's, not the model's.")] = ""
    template: Annotated[str, Meta(description="The chat template, in Jinja.")]
    details: OllamaModelDetails
    model_info: Annotated[dict[str, Any], Meta(description="Facts of the model, under the names of GGUF files.")]
    capabilities: Annotated[list[str], Meta(description="completion, embedding, vision, tools, thinking, insert.")]
    modified_at: Annotated[str, Meta(description="As in /api/tags.")]


class OllamaVersion(msgspec.Struct):
    version: Annotated[str, Meta(description="The version of Ollama whose API this is.")]
