"""What all sections of the settings share: their base class, and types and limits of values."""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_BYTES = 2**50
"""More than any machine has, and small enough that sums of sizes fit into 64 bits."""
MAX_TOKENS = 2**31 - 1
"""Positions are 32-bit numbers."""

Seconds = Annotated[float, Meta(gt=0, le=1_000_000)]
"""At most eleven days: the kernel counts timeouts in milliseconds, in 31 bits."""


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: frozen, keyword-only, and strict about unknown keys."""


Replicas = Annotated[int, Meta(ge=1, le=64, description="Number of processes of this stage, which share its work.")]
