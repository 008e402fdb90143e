"""The sizes of gated delta layers and of their states; without torch, which the CPU library does without.

A slot has the state of all layers of one row at one position, float32: of each layer S as [value heads, slices,
key_dim, SLICE], then the last TAPS - 1 inputs of the convolution, [TAPS - 1, channels].
"""

from dataclasses import dataclass

SLICE = 32
"""Columns of a state that lie side by side."""
TAPS = 4
"""Tokens that the convolution reads."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a layer."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: adjacent ones share a key head."""
    key_dim: int
    value_dim: int
    """A multiple of SLICE."""
    tiled: bool = False
    """Whether value heads that are `key_heads` apart share a key head, and not adjacent ones."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C"""
        return 2 * self.keys + self.values

    @property
    def inputs(self) -> int:
        """The numbers that a layer computes from a hidden state: queries, keys, values, z, b and a."""
        return self.channels + self.values + 2 * self.value_heads

    @property
    def state(self) -> int:
        """Floats of S."""
        return self.values * self.key_dim

    @property
    def slot(self) -> int:
        """Floats of the layer in a slot."""
        return self.state + (TAPS - 1) * self.channels
