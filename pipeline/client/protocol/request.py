"""What a client can ask: one struct, read from JSON over HTTP and from MessagePack over ZeroMQ.

    SamplingFields ─► GenerationFields ─► RequestFields ─┬─► Request     a request over ZeroMQ
                                                         └─► Body …      the bodies of the HTTP API, in the gateway

Null means a field's default everywhere. Unknown fields are ignored.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.conversation import (
    Documents,
    ImageUrl,
    Kwargs,
    Messages,
    ReasoningEffort,
    ToolChoice,
    Tools,
)
from pipeline.client.protocol.generation import GenerationFields
from pipeline.client.protocol.parts import PackedIds

MAX_SALT_CHARS = 1024
"""Maximum length of a cache salt."""
MAX_TIMEOUT_S = 1_000_000
"""Maximum timeout of a request: 11 days."""

MaxTokens = Annotated[int, Meta(ge=1, lt=2**31)]
BestOf = Annotated[int, Meta(ge=1, description="Number of sequences to generate; the n best are returned.")]


TruncationSide = Annotated[
    Literal["left", "right"],
    Meta(description="Where truncate_prompt_tokens removes tokens: left (the default) keeps the prompt's last ones."),
]
Truncate = Annotated[
    int, Meta(ge=-1, lt=2**31, description="Keep this many tokens of the prompt; -1 keeps as many as fit.")
]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31, description="Lower goes first, with schedule.policy = priority.")]
CacheSalt = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="Only prompts with the same salt share blocks of the prefix cache.",
    ),
]
Timeout = Annotated[
    float, Meta(gt=0, le=MAX_TIMEOUT_S, description="Maximum time from the arrival to the end, in seconds.")
]
Dimensions = Annotated[int, Meta(ge=1, description="Length that vectors are truncated to; default the model's.")]
Pooling = Annotated[
    Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean"],
    Meta(
        description="Which tokens' hidden states an embedding is made of; default what the model's files say, and last "
        "for models that generate text."
    ),
]
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]
"""vLLM's tasks that generate no text."""
PromptName = Annotated[
    str,
    Meta(description="The prompt of the model's files that goes before each text, such as query or document."),
]
Instruction = Annotated[
    str,
    Meta(description="Of a reranker whose template of pairs has a place for it: what makes a document relevant."),
]
UseActivation = Annotated[
    bool, Meta(description="false: logits in place of probabilities or scores; vectors are not normalized.")
]
NumLogprobs = Annotated[int, Meta(ge=0, description="Return log probabilities, with this many top logprobs.")]


class PredictionPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Annotated[str | list[PredictionPart], Meta(description="The text that most of the output may equal.")]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class RequestFields(GenerationFields, kw_only=True, omit_defaults=True):
    """Fields of chats and completions, whatever carries them."""

    prediction: (
        Annotated[
            Prediction,
            Meta(description="Speculative decoding with speculative.method = ngram proposes tokens of it, too."),
        ]
        | None
    ) = None
    model: Annotated[str, Meta(description="The model's name in /v1/models; default the served model.")] | None = None
    max_tokens: Annotated[MaxTokens, Meta(description="Maximum number of tokens to generate.")] | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Whether the tokenizer adds special tokens to the prompt.")] | None
    ) = None
    timings: Annotated[bool, Meta(description="true: the reply has the request's timings.")] | None = None
    """Pipeline's"""
    priority: Priority | None = None
    """vLLM's"""
    cache_salt: CacheSalt | None = None
    """vLLM's"""
    timeout_s: Timeout | None = None
    """Pipeline's"""


class Request(RequestFields, kw_only=True, omit_defaults=True):
    """A request over ZeroMQ: a prompt, and how to continue it. One of prompt, prompt_token_ids and messages is set.

    Its MessagePack is a map of the fields that are given. A field of type `Raw` holds JSON text there.
    """

    prompt: Annotated[str, Meta(description="A text. The tokenizer adds its special tokens.")] | None = None
    prompt_token_ids: PackedIds | None = None
    """Nothing is added to them."""
    images: (
        Annotated[
            list[ImageUrl],
            Meta(description="Of the text prompt: one for each placeholder of an image in it, in order."),
        ]
        | None
    ) = None
    messages: Annotated[Messages, Meta(description="A chat, to which the model's chat template is applied.")] | None = (
        None
    )
    add_generation_prompt: (
        Annotated[bool, Meta(description="Whether the template opens the assistant's turn.")] | None
    ) = None
    continue_final_message: (
        Annotated[
            bool, Meta(description="true: the output continues the last message. Not with add_generation_prompt.")
        ]
        | None
    ) = None
    tools: Tools = Raw()
    tool_choice: ToolChoice = Raw()
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one tool call.")] | None = None
    documents: Documents = Raw()
    chat_template_kwargs: Kwargs = Raw()
    chat_template: Annotated[Raw, Meta(description="Not supported.")] = Raw()
    reasoning_effort: ReasoningEffort | None = None
    best_of: BestOf | None = None
    logprobs: NumLogprobs | None = None
    pooling: Pooling | None = None
    dimensions: Dimensions | None = None
    task: (
        Annotated[
            PoolingTask,
            Meta(description="What the model's pooler makes of the prompt. With `pooling` alone it is embed."),
        ]
        | None
    ) = None
    pair: Annotated[str, Meta(description="With `task` and `prompt`: the second text of a pair.")] | None = None
    prompt_name: PromptName | None = None
    use_activation: UseActivation | None = None
    instruction: Instruction | None = None
    """With `pair`"""

    stream: ClassVar[None] = None
    """What the bodies over HTTP choose of the reply's form: nothing here. Each request streams."""
    stream_options: ClassVar[None] = None
    return_token_ids: ClassVar[None] = None
    return_tokens_as_token_ids: ClassVar[None] = None
    request_id: ClassVar[None] = None


def json_text(text: str) -> Raw:
    """JSON text in a field of type `Raw`, for MessagePack."""
    return Raw(msgspec.msgpack.encode(text))
