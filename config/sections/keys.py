"""`[[keys]]`: API keys that have a name, limits and models. The table holds no key, only digests and names of files."""

from typing import Annotated

from msgspec import Meta

from pipeline.config.sections.base import Frozen

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
MAX_LIMIT = 10**12


class KeySettings(Frozen, frozen=True):
    """An API key with a name."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN, description="What logs and metrics call it; it is not secret.")]
    digest: Annotated[
        str, Meta(pattern=r"^(|(sha256:)?[0-9a-fA-F]{64})$", description="SHA-256 of the key, in hexadecimal digits.")
    ] = ""
    file: Annotated[str, Meta(description="File with the key; with several, one per line, each is valid.")] = ""
    rpm: Annotated[int, Meta(ge=0, le=MAX_LIMIT, description="Requests in a minute; 0 is no limit.")] = 0
    tpm: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_LIMIT,
            description="Tokens in a minute, of prompts and output; 0 is no limit. Each of several replicas counts by "
            "itself.",
        ),
    ] = 0
    models: Annotated[tuple[str, ...], Meta(description="Models and LoRA adapters that it may use; empty is all.")] = ()
