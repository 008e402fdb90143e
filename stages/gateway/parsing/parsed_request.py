"""A client request after parsing, and the limits that parsing checks."""

import msgspec

from pipeline.config.settings import Limits as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.parsing.conversation import ReplyForm
from pipeline.stages.gateway.parsing.token_detail_options import TokenDetailOptions
from pipeline.text.formats.chat_formats import ChatFormats


class RequestLimits(msgspec.Struct):
    model: str
    """The name that requests must give."""
    max_sequences: int
    """Sequences that may be open at once: a call for more can never be served."""
    has_priorities: bool = False
    """Whether the scheduler's policy looks at them."""
    max_prompt_tokens: int | None = None
    """Longest prompt that anything is computed from; None before `Start` has said it, as the next two."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    """Numbers of an embedding."""
    caps: Caps = Caps()
    """How much one request may ask for."""
    formats: ChatFormats = ChatFormats()
    """How the model writes calls and reasoning."""


class EmbeddingOptions(msgspec.Struct, frozen=True, kw_only=True):
    dimensions: int | None = None
    """Numbers of each; None: as many as the model has."""
    is_base64: bool = False
    """float32, little-endian, in base64, rather than a list of numbers"""


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One client call, checked. `sampling.seed` is left to who opens the requests: each prompt gets its own."""

    is_chat: bool
    model: str
    prompts: list[m.Prompt]
    n: int
    """Sequences that are returned for each prompt."""
    max_tokens: int | None
    max_tokens_param: str
    """The field that said so."""
    seed: int | None
    """u64; None draws one"""
    sampling: m.Sampling
    text: m.TextOptions
    stream: bool
    include_usage: bool
    outputs: list[bytes] = []
    """int32; output ids that the client has already, one entry a sequence; none of them for a fresh request"""
    echo: bool = False
    """The prompt's text comes before the output's."""
    prompt_options: m.PromptOptions = m.PromptOptions()
    prompt_param: str = "prompt"
    """The field that holds the prompts."""
    request_id: str | None = None
    """The client's own."""
    timings: bool = False
    """The reply says where its time went."""
    received_s: float = 0.0
    """When the client began to ask, by time.monotonic(); 0 where nobody has noted it."""
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    """From then to its end; None where it does not say."""
    best_of: int | None = None
    """Sequences that are generated for each prompt, of which the n best are returned; None: n, and all are."""
    grammar: m.Grammar | None = None
    """What the output is to match."""
    bad_words: list[str] = []
    details: TokenDetailOptions = TokenDetailOptions()
    """What is told of ids."""
    hides_output: bool = False
    """One id is generated that nobody asked for, because the prompt's log probabilities need a forward pass."""
    continuous_usage: bool = False
    """Each event of the stream says how much has been used by then."""
    is_tokens_only: bool = False
    """The reply has ids and no text."""
    embedding: EmbeddingOptions | None = None
    """The reply has the prompts' embeddings."""
    reply: ReplyForm | None = None
    """What is looked for in the output; None where that is nothing."""
    scope: str = ""
    """Of the API key that its client has shown (`Keys.scope_of`): requests of other scopes neither abort it nor find
    its prefix-cache blocks. Empty where there is no key."""

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.best_of or self.n

    @property
    def is_lookup(self) -> bool:
        """Whether it is about the prompt alone, and has no output."""
        return self.prompt_options.any_length
