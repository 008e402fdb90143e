"""What a reply of Ollama's API repeats of its request. Pure."""

from typing import Literal

import msgspec


class OllamaFields(msgspec.Struct, frozen=True, kw_only=True):
    """A request of Ollama's API, besides its prompt and its sampling options."""

    route: Literal["chat", "generate", "embed", "embeddings"]
    """Its path is /api/ and this."""
    model: str
    """The model's name as the client wrote it, with or without a tag."""
    unloads: bool = False
    """A request without a prompt that asks to unload the model, which stays."""
