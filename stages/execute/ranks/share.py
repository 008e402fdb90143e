"""A rank's share of a model: which heads, and which part of each size.

    matrix             cut into                     results on CPUs
    query, key, value  groups of heads              the rank's own queries and KV cache, or states
    o, down            hidden, in panels            gathered in the residual
    gate, up           intermediate, in groups      gathered
    embedding, head    vocabulary, in panels        gathered

On CPUs, every matrix is cut by its outputs, never by its depth, so each number is computed by one rank, in the same
order as without ranks: results are bit-identical for any number of ranks. GPUs have the same heads and the same part of
the vocabulary, but cut o and down by their inputs, and add what the ranks have computed (cuda/ranks/cut.py): it takes
two exchanges per layer instead of four.

KV heads are dealt unevenly if their number is no multiple of the ranks'. With more ranks than KV heads, several ranks
have the same KV head, and each of them a part of its query heads.
"""

from dataclasses import dataclass

from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import DeltaNet

PANEL = 16
"""Outputs are cut between panels of the packed weights."""
GROUP = 32
"""Columns of `down` are cut between groups that are quantized together."""


@dataclass(frozen=True, slots=True)
class Share:
    """Ranges of what a rank computes."""

    rank: int
    num_ranks: int
    heads: range
    """Query heads."""
    kv_heads: range
    hidden: range
    inner: range
    """Outputs of gate, and of up."""
    experts_inner: range
    """The same of each expert of a mixture."""
    shared_inner: range
    """The same of the expert that computes every token."""
    vocab: range
    delta_keys: range = range(0)
    """Key heads of recurrent layers; the rank has all their value heads."""

    @property
    def is_whole(self) -> bool:
        return self.num_ranks == 1


def share_of(config: ModelConfig, rank: int = 0, num_ranks: int = 1) -> Share:
    """The share of a rank. Raises UserError if the model can't be cut into so many."""
    heads, kv_heads = _heads(config, rank, num_ranks)
    experts = config.experts
    return Share(
        rank=rank,
        num_ranks=num_ranks,
        heads=heads,
        kv_heads=kv_heads,
        hidden=cut(config.hidden_size, PANEL, rank, num_ranks),
        inner=cut(config.intermediate_size, GROUP, rank, num_ranks),
        experts_inner=cut(0 if experts is None else experts.intermediate_size, GROUP, rank, num_ranks),
        shared_inner=cut(0 if experts is None else experts.shared_intermediate_size, GROUP, rank, num_ranks),
        vocab=cut(config.vocab_size, PANEL, rank, num_ranks),
        delta_keys=_dealt(0 if config.delta is None else config.delta.key_heads, rank, num_ranks),
    )


def value_heads_of(delta: DeltaNet, key_heads: range) -> list[int]:
    """The value heads that share these key heads, in the order of a model that has no others."""
    ratio = delta.value_heads // delta.key_heads
    if delta.tiled:
        return [first + head for first in range(0, delta.value_heads, delta.key_heads) for head in key_heads]
    return list(range(key_heads.start * ratio, key_heads.stop * ratio))


def most_kv_heads(config: ModelConfig, num_ranks: int) -> int:
    """KV heads of the rank that has most of them. Raises UserError as `share_of`."""
    return len(share_of(config, 0, num_ranks).kv_heads)


def unevenness(config: ModelConfig, num_ranks: int) -> str:
    """A warning if not all ranks have the same number of heads, so that some wait for others; else empty."""
    shares = [share_of(config, rank, num_ranks) for rank in range(num_ranks)]
    for what, nums in (
        ("KV heads", [len(share.kv_heads) for share in shares]),
        ("query heads", [len(share.heads) for share in shares]),
    ):
        if len(set(nums)) > 1:
            return (
                f"execute.tensor_parallel: {num_ranks} ranks have {', '.join(map(str, nums))} {what}: in attention, "
                "some wait for others"
            )
    return ""


def cut(size: int, unit: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `size` things, in whole units but the last. Empty if there are too few units."""
    units = -(-size // unit)
    begin, end = (units * bound // num_ranks * unit for bound in (rank, rank + 1))
    return range(min(begin, size), min(end, size))


def possible(config: ModelConfig) -> list[int]:
    """The numbers of ranks that a model can be cut into."""
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    most = num_heads if config.delta is None else min(num_heads, config.delta.key_heads)
    return [num for num in range(1, most + 1) if num <= num_kv_heads or num % num_kv_heads == 0]


def _heads(config: ModelConfig, rank: int, num_ranks: int) -> tuple[range, range]:
    """The query heads and the KV heads of a rank. The first ranks have one more, if not all have the same number."""
    num_kv_heads, per_kv_head = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if num_ranks not in (choices := possible(config)):
        *first, last = map(str, choices)
        raise UserError(
            f"execute.tensor_parallel: {num_ranks} ranks, but the model has {num_kv_heads} KV heads: choose "
            f"{', '.join(first)} or {last}"
            if first
            else f"execute.tensor_parallel: {num_ranks} ranks, but the model has one head: choose 1"
        )
    if num_ranks <= num_kv_heads:
        kv_heads = _dealt(num_kv_heads, rank, num_ranks)
        return range(kv_heads.start * per_kv_head, kv_heads.stop * per_kv_head), kv_heads
    sharers = num_ranks // num_kv_heads
    kv_head, index = divmod(rank, sharers)
    queries = _dealt(per_kv_head, index, sharers)
    first_query = kv_head * per_kv_head
    return range(first_query + queries.start, first_query + queries.stop), range(kv_head, kv_head + 1)


def _dealt(num: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `num` things; the first ranks have the ones that are left over."""
    begin, end = (bound * (num // num_ranks) + min(bound, num % num_ranks) for bound in (rank, rank + 1))
    return range(begin, end)
