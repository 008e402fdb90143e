"""Messages that ingest receives."""

from pipeline.runtime.messages.common import Abort, Message, Ping, Release, Start, Stop
from pipeline.runtime.messages.requests import EncodedImage, GenerationOptions, Prompt, PromptOptions
from pipeline.runtime.messages.restarts import PeerRestarted
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
    options: GenerationOptions
    outputs: list[Array] = []
    """int32; output ids that the client has already, one array for each sequence; empty for a new request"""
    prompt_options: PromptOptions = PromptOptions()
    gateway_incarnation: int = 1
    template_s: float = 0.0
    """Unix time for a chat template that writes it; 0: `arrival_s`. A client that continues a stream has chosen it."""
    scope_id: str = ""
    """Whose request it is (`api_keys.scope_id`): ingest divides its time fairly among scopes. Empty without API
    keys."""
    images: list[EncodedImage] = []
    """Of a chat, in the order of its messages, whose `image_offsets` say where they are."""


IngestInbox = Submit | Abort | Release | PeerRestarted | Start | Ping | Stop
