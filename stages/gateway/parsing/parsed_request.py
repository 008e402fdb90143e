"""A client request after parsing, and the limits that parsing checks."""

from collections.abc import Iterable

import msgspec

from pipeline.config.settings import LimitSettings as Caps
from pipeline.media.support import TEXT_ONLY
from pipeline.runtime import messages as m
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.runtime.model.pooler import LAST_TOKEN, Pooler, Task
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.parsing.chat.conversation import ReplyParsing
from pipeline.stages.gateway.parsing.chat.images import ChatImages
from pipeline.stages.gateway.parsing.token_detail_options import TokenDetailOptions
from pipeline.text.formats.chat_formats import ChatFormats


class RequestLimits(msgspec.Struct):
    """The server's limits for a request. `Start` completes them."""

    model: str
    """The model name that requests must use."""
    max_sequences: int
    """Sequences that may be open at once: a request for more can never be served."""
    has_priorities: bool = False
    """Whether the scheduling policy uses priorities."""
    max_prompt_tokens: int | None = None
    """Longest prompt that the model takes. None before `Start`, like the next two."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    """Numbers of an embedding, or of an input's logits."""
    tasks: tuple[Task, ...] = ("generate", "embed")
    """What the model can be asked for."""
    pooler: Pooler = LAST_TOKEN
    """How it makes embeddings or logits."""
    why_no_images: str = TEXT_ONLY
    """Why requests can't have images; empty if they can."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images may be fetched, as in the settings."""
    caps: Caps = Caps()
    """The settings in `limits`."""
    formats: ChatFormats = ChatFormats()
    """How the model writes tool calls and reasoning."""
    adapters: dict[str, m.Adapter] = {}
    """LoRA adapters, by the name that requests use in place of `model`."""
    defaults: GenerationDefaults = GenerationDefaults()
    """Values of sampling fields that a request doesn't give."""
    allowed: tuple[str, ...] = ()
    """The names that the client's API key may use; empty for all."""
    aliases: tuple[str, ...] = ()
    """Further names of `model`. A key that may use the model may use it by any of them."""

    def allows(self, name: str) -> bool:
        """Whether the client may use a model or an adapter of this name, if there is one."""
        return not self.allowed or name in self.allowed or (name in self.aliases and self.model in self.allowed)

    def images(self, *, fetches: bool = True) -> ChatImages:
        """Takes the images of one prompt. `fetches`: what has the request fetches those of URLs."""
        if not fetches:
            return ChatImages(self.why_no_images, self.caps.max_images, why_no_urls="none are fetched over ZeroMQ")
        return ChatImages(self.why_no_images, self.caps.max_images, self.allowed_media_domains)

    def for_key(self, allowed: tuple[str, ...]) -> "RequestLimits":
        """The limits of a client whose API key may use these names."""
        return msgspec.structs.replace(self, allowed=allowed) if allowed else self

    @property
    def names(self) -> list[str]:
        """The model, its aliases and the adapters that the client may use."""
        return [name for name in (self.model, *self.aliases, *self.adapters) if self.allows(name)]

    def adapter_id(self, name: str) -> str:
        """For the options of a request with this model name; empty if it is the model itself."""
        adapter = self.adapters.get(name)
        return "" if adapter is None else adapter.id


class EmbeddingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How embeddings are returned."""

    dimensions: int | None = None
    """Length of each vector; None for the model's own."""
    is_base64: bool = False
    """As base64 of little-endian float32, not as a list of numbers."""
    normalize: bool = True
    """Each vector has length 1."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream over HTTP continues; see resumption.py."""

    id: str
    created: int
    arrival_s: float
    """When the first server got the request, in Unix time: what its chat template took for the time."""
    salt: int
    prompt: str
    """Digest of the prompt's ids."""
    num_chars: list[int]
    """Characters of each sequence's text that its events were made of."""
    has_ended: list[bool]
    """Whether the client has the end of each sequence."""
    age_s: float = 0.0
    """From the arrival at the first server to that at this one: its deadline is nearer by this."""


class RequestSize(msgspec.Struct, frozen=True):
    """What is measured where a body is parsed, which is a thread if it takes long: it needs a walk through everything
    that the client sent. See open_bytes.py."""

    reply_bytes: int
    """Bytes that are kept for the reply, whatever becomes of the prompts."""
    prompts: list[int]
    """Bytes of each prompt in one process."""
    num_tokens: list[int]
    """Estimates of the tokens of each prompt; exact for ids."""


MAX_SHOWN_TYPES = 16
MAX_TYPE_CHARS = 64


def shown_types(types: Iterable[str]) -> list[str]:
    """Different ones, of which the log has no more than this: clients choose them."""
    return sorted({one[:MAX_TYPE_CHARS] for one in types})[:MAX_SHOWN_TYPES]


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. RequestTable completes `options` for each prompt: its seed, and the scope of its salt."""

    dialect: Dialect
    """How it is answered."""
    model: str
    prompts: list[m.Prompt]
    n: int
    """Sequences to return for each prompt: with best_of, the best of `options.n`."""
    max_tokens_param: str
    """The field that sets `options.max_tokens`."""
    seed: int | None
    """u64; None for a random seed"""
    options: m.GenerationOptions
    stream: bool
    include_usage: bool
    outputs: list[bytes] = []
    """int32: for a resumed request, the output ids that the client has, one entry for each sequence"""
    images: list[m.EncodedImage] = []
    """Of the one prompt, a chat, in its order"""
    echo: bool = False
    """The prompt's text comes before the output's."""
    prompt_options: m.PromptOptions = m.PromptOptions()
    prompt_param: str = "prompt"
    """The field that holds the prompts."""
    request_id: str | None = None
    """Chosen by the client."""
    timings: bool = False
    """The reply has timings."""
    with_metrics: bool = False
    """The reply has vLLM's metrics."""
    traceparent: str = ""
    """The client's span; empty if it named none."""
    received_s: float = 0.0
    """When the request began to arrive, by time.monotonic(); 0 if unknown."""
    timeout_s: float | None = None
    """From its arrival to its end; None for the server's default."""
    details: TokenDetailOptions = TokenDetailOptions()
    """Which token details the reply has."""
    hides_output: bool = False
    """One id is generated and not returned: prompt logprobs need a forward pass."""
    continuous_usage: bool = False
    """Each event of the stream has usage."""
    embedding: EmbeddingOptions | None = None
    """How the prompts' embeddings are returned, if that is the task."""
    task: Task = "generate"
    """What is asked of the model."""
    reply: ReplyParsing | None = None
    """What to parse in the output; None for nothing."""
    scope: str = ""
    """Scope of the client's API key (`Keys.scope_of`): requests of other scopes neither abort it nor find its
    prefix-cache blocks. Empty without a key."""
    reply_role: str = "assistant"
    """Role of the message in the reply to a chat."""
    echoed: str = ""
    """Text that comes before the content of a chat's reply: the last message, if the client wants it back."""
    resumption: Resumption | None = None
    """Of a stream that is continued."""
    has_resume_points: bool = False
    """The stream has resume points."""
    left_s: float | None = None
    """What it may take from `received_s` on, if an ingress has said so."""
    size: RequestSize | None = None
    """None if it was not measured yet."""
    left_out: list[str] = []
    """Types of tools that the model does not get, for the log; as `shown_types` makes it"""

    @property
    def age_s(self) -> float:
        """Its age at `received_s`, if it continues a stream: only its deadline counts it."""
        return 0.0 if self.resumption is None else self.resumption.age_s

    @property
    def num_sequences(self) -> int:
        """Sequences to generate for each prompt."""
        return self.options.n

    @property
    def is_best_of(self) -> bool:
        """Whether the n best of its sequences are returned."""
        return self.options.n > self.n

    @property
    def is_pooled(self) -> bool:
        """Whether its output is what the model's pooler makes of the prompts: there is no text."""
        return self.options.pooling != m.Pooling.NONE

    @property
    def is_prompt_only(self) -> bool:
        """Whether it is about the prompt only, and has no output."""
        return self.prompt_options.any_length
