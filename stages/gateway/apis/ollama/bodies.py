"""Request bodies of Ollama's API, and the fields and options of it that are not supported.

Fields in neither a struct nor a table are ignored. So are options that set up a runner (num_ctx, num_gpu ...) and
options that Ollama doesn't know, as in Ollama. Null means a field's default everywhere.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.conversation import MAX_ID_CHARS, Tools
from pipeline.client.protocol.sampling import (
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    ThinkingTokenBudget,
    TopK,
    TopP,
)
from pipeline.stages.gateway.parsing.bodies import NAME_ENDS

ROLES = ("system", "user", "assistant", "tool")
OBJECT = {"type": "object"}
"""JSON schema of fields that are not decoded"""
FORMAT = {"anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]}

TAG = ":latest"
"""Ollama appends it to names without a tag, and so do its clients."""
ModelName = Annotated[
    str,
    Meta(
        min_length=1,
        description="The model's name in /api/tags; `:latest` may be left out.",
        extra_json_schema={NAME_ENDS: [TAG]},
    ),
]
Images = Annotated[
    list[str], Meta(description="Base64 of images, for models that take them; they stand before the text.")
]
MAX_DURATION_CHARS = 256
"""Go writes no duration longer than 25 characters."""
Duration = Annotated[
    str,
    Meta(  # no two parts of it match the same text, so that a long one takes no longer than its length
        pattern=r"^-?([0-9]+|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$", max_length=MAX_DURATION_CHARS
    ),
]
KeepAlive = Annotated[
    float | Duration, Meta(description="No effect: the model stays loaded. Seconds, or a duration such as 5m.")
]
Format = Annotated[
    Raw, Meta(description="json: the reply is a JSON object. An object: a JSON Schema.", extra_json_schema=FORMAT)
]
Think = Annotated[
    bool | Literal["low", "medium", "high", "max"],
    Meta(description="false: no reasoning. true or a level needs a model that can reason."),
]
Stream = Annotated[bool, Meta(description="By default true: one JSON object per line.")]
Logprobs = Annotated[bool, Meta(description="true: the reply has the log probability of each token.")]
TopLogprobs = Annotated[int, Meta(ge=0, description="With logprobs: this many top logprobs for each token.")]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options of the generation. The defaults are Ollama's, except for repeat_penalty."""

    temperature: Annotated[Temperature, Meta(description="0 is greedy; default 0.8.")] | None = None
    top_p: Annotated[TopP, Meta(description="By default 0.9.")] | None = None
    top_k: Annotated[TopK, Meta(description="By default 40; -1 and 0 are off.")] | None = None
    min_p: Annotated[MinP, Meta(description="By default 0.")] | None = None
    thinking_token_budget: ThinkingTokenBudget | None = None
    """Ours"""
    seed: (
        Annotated[Seed, Meta(description="-2^63 to 2^64 - 1; the same seed gives the same text. -1 is random.")] | None
    ) = None
    num_predict: (
        Annotated[
            int,
            Meta(ge=-2, lt=2**31, description="Maximum number of tokens to generate. -2 to 0: the model's default."),
        ]
        | None
    ) = None
    stop: Stop | None = None
    repeat_penalty: (
        Annotated[
            RepetitionPenalty,
            Meta(description="Above 1 makes tokens of the prompt and the output less likely; default 1."),
        ]
        | None
    ) = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repeat_last_n: (
        Annotated[
            int,
            Meta(
                ge=-1,
                lt=2**31,
                description="-1, the default: penalties count all tokens. 0: no penalties. Others are not supported "
                "together with a penalty.",
            ),
        ]
        | None
    ) = None
    mirostat: Annotated[Raw, Meta(description="Not supported: must be null or 0.")] = Raw()
    tfs_z: Annotated[Raw, Meta(description="Not supported: must be null or 1.")] = Raw()
    typical_p: Annotated[Raw, Meta(description="Not supported: must be null or 1.")] = Raw()


OPTIONS_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}
"""Options that are not supported, and the values, besides null, at which they change nothing."""


class OllamaFunctionCall(msgspec.Struct):
    name: str
    arguments: Annotated[Raw, Meta(extra_json_schema=OBJECT)] = Raw()


class OllamaToolCallParam(msgspec.Struct):
    function: OllamaFunctionCall
    id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None


class OllamaMessage(msgspec.Struct):
    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | None = None
    thinking: Annotated[str, Meta(description="In an assistant's message: its reasoning.")] | None = None
    images: Images | None = None
    tool_calls: list[OllamaToolCallParam] | None = None
    tool_name: Annotated[str, Meta(description="In a tool's message: the name of the tool.")] | None = None
    tool_call_id: (
        Annotated[
            str,
            Meta(
                max_length=MAX_ID_CHARS,
                description="In a tool's message: the id of the call that it answers. Without it, the first call with "
                "this tool_name, or the first one, that has no result yet.",
            ),
        ]
        | None
    ) = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """Fields of both endpoints that generate"""

    model: ModelName
    stream: Stream | None = None
    format: Format = Raw()
    options: OllamaOptions | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: Logprobs | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """POST /api/chat"""

    messages: (
        Annotated[list[OllamaMessage], Meta(description="Empty: only checks that the model is loaded.")] | None
    ) = None
    tools: Tools = Raw()


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """POST /api/generate"""

    prompt: Annotated[str, Meta(description="Empty: only checks that the model is loaded.")] | None = None
    suffix: (
        Annotated[str, Meta(description="Text after the output. The model must have fill-in-the-middle tokens.")] | None
    ) = None
    system: Annotated[str, Meta(description="The system prompt.")] | None = None
    raw: Annotated[bool, Meta(description="true: the prompt is used as it is, without a chat template.")] | None = None
    images: Images | None = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """POST /api/embed"""

    model: ModelName
    input: Annotated[str | list[str], Meta(description="A text or several.")]
    truncate: (
        Annotated[
            bool,
            Meta(description="By default true: of an input that is too long, keep the last tokens. false: an error."),
        ]
        | None
    ) = None
    dimensions: (
        Annotated[int, Meta(ge=1, description="Length that vectors are truncated to; default the model's.")] | None
    ) = None
    options: Annotated[dict[str, Raw], Meta(description="No effect.")] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /api/embeddings"""

    model: ModelName
    prompt: Annotated[str, Meta(description="The text.")] | None = None
    options: Annotated[dict[str, Raw], Meta(description="No effect.")] | None = None
    keep_alive: KeepAlive | None = None


class OllamaShowBody(msgspec.Struct, kw_only=True):
    """POST /api/show"""

    model: ModelName | None = None
    name: Annotated[str, Meta(description="Older name of `model`.")] | None = None
    verbose: Annotated[bool, Meta(description="No effect.")] | None = None


OLLAMA_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {"shift": (False,), "template": ("",), "truncate": (False,)}
"""Fields of the API that are not supported, and the values besides null that have no effect, as in
`bodies.UNSUPPORTED_FIELDS`."""

OLLAMA_GENERATE_UNSUPPORTED_FIELDS = OLLAMA_UNSUPPORTED_FIELDS | {
    "context": ([],),
    "height": (0,),
    "steps": (0,),
    "width": (0,),
}
