"""How a model's rotary embeddings are computed."""

import msgspec


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="llama3"):
    """The RoPE scaling of Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class LinearRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="linear"):
    """Positions are divided by `factor`."""

    factor: float


class YarnRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="yarn", kw_only=True):
    """YaRN (Peng et al., 2023, arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    magnitude: float
    """Factor of rotated queries and keys."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the interpolated dimensions are rounded to whole ones."""


class LongRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="longrope", kw_only=True):
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753). The server uses one set of factors for all positions."""

    original_max_position: int
    magnitude: float
    """Factor of rotated queries and keys."""
    short_factors: tuple[float, ...]
    """Divisors of the frequencies, one for each pair of dimensions, if sequences are limited to
    `original_max_position`."""
    long_factors: tuple[float, ...]
    """The same if sequences may be longer."""


class ProportionalRope(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="proportional", kw_only=True
):
    """Only the first pairs of a head rotate, with the frequencies that they have if all rotate (Gemma 4)."""

    part: float
    """The pairs that rotate, of all."""
    factor: float = 1.0
    """Positions are divided by it."""


RopeScaling = Llama3Rope | LinearRope | YarnRope | LongRope | ProportionalRope


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rotary embedding."""

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None
    """The first dimensions of a head that rotate; None: `ModelConfig.rotary_dim`."""
