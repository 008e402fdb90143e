"""Messages that ingest receives."""

from pipeline.runtime.messages.common import Abort, Message, Ping, Release, Start, Stop
from pipeline.runtime.messages.requests import Grammar, Prompt, PromptOptions, Sampling, TextOptions
from pipeline.shm.arrays import Array


class Submit(Message, frozen=True, tag="submit"):
    """From the gateway: one prompt to generate from."""

    request_id: int
    attempt: int
    gateway: int
    """Replica that gets the answers."""
    arrival_s: float
    """Unix time, stamped by the gateway; the scheduler's order."""
    prompt: Prompt
    n: int
    max_tokens: int | None
    """None: as many as fit. 0: none; `Accepted` closes the request, and schedule never gets it."""
    sampling: Sampling
    text: TextOptions
    outputs: list[Array] = []
    """int32; output ids that the client has already, one array for each sequence; empty for a new request"""
    prompt_options: PromptOptions = PromptOptions()
    priority: int = 0
    """Lower goes first if the scheduler's policy is `priority`."""
    cache_salt: str = ""
    """Only prompts with the same salt share KV blocks. With API keys it is the client's own salt within the scope of
    its key (`api_keys.scoped_salt`)."""
    grammar: Grammar | None = None
    bad_words: list[str] = []
    """Texts that the output must not contain; ingest tokenizes them."""


IngestInbox = Submit | Abort | Release | Start | Ping | Stop
