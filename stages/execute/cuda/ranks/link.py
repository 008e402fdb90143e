"""What a model on several GPUs exchanges: sums of layers' results, and logits.

    o, down     each rank has columns of the matrix     parts [P, T, H] of each rank ──► their sum over the ranks
    embedding   each rank has ids of the vocabulary     zeros but for its own ids ──► the same
    LM head     each rank has rows of the matrix        logits of its ids ──► all logits, on rank 0

How a sum is made depends on the shape of the step only, so all ranks choose alike. Up to `GATHERED_TOKENS` tokens, the
parts of all ranks are gathered, and the next kernel adds them in the order of the ranks, as it adds split-K partials;
or `one_shot_all_reduce` does both. Beyond, NCCL reduces them.

Shapes: R ranks, P split-K partials, T tokens, H hidden size, S samples, V vocabulary.
"""

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.kernels.triton.all_reduce import (
    MAX_NUMBERS,
    MAX_PROGRAMS,
    one_shot_all_reduce,
    sum_partials,
    symmetric_words,
)
from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.stages.execute.cuda.ranks.board import RankBoard
from pipeline.stages.execute.cuda.ranks.collectives import Collectives
from pipeline.stages.execute.ranks.share import PANEL, Share, cut

GATHERED_TOKENS = 64
"""Gathering sends R - 1 parts to each rank, reducing at most two: beyond this, the bytes cost more than the latency."""


class OneShot:
    """Symmetric memory of all ranks, and this rank's counts."""

    def __init__(self, addresses: list[int], rank: int, where: torch.device, owner: object) -> None:
        """`owner` keeps the memory at the addresses alive."""
        self.rank, self._owner = rank, owner
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=where)
        self.counts = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=where)

    def reduce(self, out: Tensor, partials: Tensor) -> None:
        one_shot_all_reduce(out, partials, self.addresses, self.counts, self.rank)


def one_shot_of(board: RankBoard, where: torch.device) -> OneShot:
    """Waits for the other ranks. Raises UserError if the GPUs can't read each other's memory."""
    context, num_bytes = board.context, 4 * symmetric_words(board.context.num_ranks)
    if INTERPRETED:  # pages that all processes map
        size = -(-num_bytes // 4096) * 4096
        begin = -(-board.num_bytes // 4096) * 4096
        areas = [board.allocate(begin + rank * size, num_bytes) for rank in range(context.num_ranks)]
        addresses = [int(area.ctypes.data) for area in areas]
        board.agree([])
        return OneShot(addresses, context.rank, where, areas)
    others = [rank for rank in range(context.num_ranks) if rank != context.rank]
    blocked = [rank for rank in others if not torch.cuda.can_device_access_peer(where, rank)]
    if blocked:
        raise UserError(
            f"execute.all_reduce is 'one_shot', but GPU {context.rank} can't read the memory of GPU {blocked[0]}: "
            "set it to 'nccl'"
        )
    try:
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(num_bytes // 4, dtype=torch.float32, device=where).zero_()
        torch.cuda.synchronize(where)
        group = torch.distributed.group.WORLD
        assert group is not None
        handle = symmetric.rendezvous(memory, group)
        addresses = [int(address) for address in handle.buffer_ptrs]
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"execute.all_reduce is 'one_shot', but torch has no symmetric memory here ({error}): set it to 'nccl'"
        ) from error
    board.agree([])  # all are zeroed
    return OneShot(addresses, context.rank, where, (memory, handle))


class RankLink:
    """Owned by the model."""

    def __init__(
        self,
        share: Share,
        vocab_size: int,
        hidden_size: int,
        max_num_samples: int,
        where: torch.device,
        collectives: Collectives,
        one_shot: OneShot | None = None,
    ) -> None:
        self.share, self._collectives, self._one_shot = share, collectives, one_shot
        self._vocab = [cut(vocab_size, PANEL, rank, share.num_ranks) for rank in range(share.num_ranks)]
        widest = max(map(len, self._vocab))

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=where)

        self._own = floats(GATHERED_TOKENS, hidden_size)
        self._gathered = floats(share.num_ranks, GATHERED_TOKENS, hidden_size)
        self._own_logits = floats(max_num_samples, widest)
        self._logits = floats(share.num_ranks, max_num_samples, widest)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which samples."""
        return self.share.rank == 0

    def sum(self, partials: Tensor) -> Tensor:
        """The sum of `partials` [P, T, H] over the ranks, as partials [P', T, H] that the next kernel adds. Valid until
        the next sum; may overwrite `partials`."""
        num_tokens, hidden = partials.shape[1:]
        if self._one_shot is not None and num_tokens <= GATHERED_TOKENS and num_tokens * hidden <= MAX_NUMBERS:
            out = self._own[:num_tokens]
            self._one_shot.reduce(out, partials)
            return out.unsqueeze(0)
        if num_tokens > GATHERED_TOKENS:
            assert len(partials) == 1
            self._collectives.all_reduce(partials[0])
            return partials
        own = partials[0]
        if len(partials) > 1:
            own = self._own[:num_tokens]
            sum_partials(own, partials)
        memory = self._gathered.view(-1).view(own.dtype)
        out = memory[: self.share.num_ranks * own.numel()].view(self.share.num_ranks, num_tokens, hidden)
        self._collectives.all_gather(out, own)
        return out

    def sum_embeddings(self, residual: Tensor) -> None:
        """The sum of `residual` [T, H] over the ranks, in place. Only one rank has other numbers than zeros for a
        token, so it is exact."""
        if self._one_shot is not None and residual.numel() <= MAX_NUMBERS:
            self._one_shot.reduce(residual, residual.unsqueeze(0))
        else:
            self._collectives.all_reduce(residual)

    def own_logits(self, num_samples: int) -> Tensor:
        """The memory of this rank's logits: [S, V of the rank], rows may be apart."""
        return self._own_logits[:num_samples, : len(self.share.vocab)]

    def gather_logits(self, logits: Tensor, num_samples: int) -> None:
        """Write the logits of all ranks to `logits` [S, V] of rank 0; those of others have no rows."""
        own = self._own_logits[:num_samples]
        out = self._logits.view(-1)[: self.share.num_ranks * own.numel()].view(self.share.num_ranks, *own.shape)
        self._collectives.all_gather(out, own)
        if self.is_first:
            for part, vocab in zip(out, self._vocab, strict=True):
                logits[:, vocab.start : vocab.stop].copy_(part[:, : len(vocab)])

    def share_ids(self, ids: Tensor) -> None:
        """The ids that rank 0 has sampled. ids [S] int32"""
        self._collectives.broadcast(ids)

    def close(self) -> None:
        self._collectives.close()
