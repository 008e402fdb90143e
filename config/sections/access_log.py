"""`[access_log]`: a line for each request."""

from typing import Annotated, Literal

from msgspec import Meta

from pipeline.config.sections.base import MAX_BYTES, Frozen

STANDARD_ERROR = "-"


class AccessLogSettings(Frozen, frozen=True):
    """A log with a line for each request: who, what, tokens, times and status."""

    file: Annotated[
        str,
        Meta(
            description='File that lines are appended to; "-" is standard error, which is not rotated. Empty: no '
            "access log."
        ),
    ] = ""
    format: Annotated[
        Literal["json", "text"], Meta(description='"json" is one object per line, "text" is for people.')
    ] = "json"
    max_bytes: Annotated[
        int, Meta(ge=64 * 1024, le=MAX_BYTES, description="Size of the file at which it is rotated to FILE.1.")
    ] = 100 * 1024**2
    max_files: Annotated[
        int, Meta(ge=1, le=1000, description="Rotated files that are kept, FILE.1 to FILE.N; older ones are deleted.")
    ] = 5
