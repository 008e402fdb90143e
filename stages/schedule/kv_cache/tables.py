"""A sequence's block table in one KV group, when it starts."""

import msgspec


class BlockTable(msgspec.Struct, frozen=True):
    """Blocks at the places `first` .. `end`. No step reads those before."""

    first: int
    blocks: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)
