"""Operations that all ranks make together, in the same order: torch.distributed over NCCL, or over gloo where kernels
are interpreted.

The ranks find each other through a file in memory that rank 0 creates and the others open (`RankBoard`), so nothing
listens on a port and no file is left behind.
"""

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from pipeline.errors import UserError
from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.stages.execute.cuda.ranks.board import RankBoard
from pipeline.stages.execute.ranks.context import LOAD_TIMEOUT_S


class Collectives(ABC):
    """On the current stream, and part of a graph that is being captured. Tensors are contiguous, and have the same
    shape on all ranks."""

    @abstractmethod
    def all_gather(self, out: Tensor, own: Tensor) -> None:
        """out[r] = `own` of rank r. out [R, ...]"""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over the ranks, in place; the same bits on all of them."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """The tensor of rank 0."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


class TorchCollectives(Collectives):
    """A process has at most one."""

    def __init__(self, board: RankBoard, where: torch.device) -> None:
        """Waits for the other ranks. Raises UserError if torch can't connect them."""
        self._board = board
        backend = "gloo" if INTERPRETED else "nccl"
        if not dist.is_available() or not dist.is_backend_available(backend):
            raise UserError(f"execute.tensor_parallel: the installed torch has no {backend}: install torch for CUDA")
        if board.context.rank:
            self._fd = board.open_file()
        else:
            self._fd = os.memfd_create("ranks-store", os.MFD_CLOEXEC)
            board.publish_file(self._fd)
        if INTERPRETED:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = FileStore(f"/proc/self/fd/{self._fd}", board.context.num_ranks)
        device: dict[str, Any] = {} if INTERPRETED else {"device_id": where}  # NCCL connects now, not in a step
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=board.context.rank,
                world_size=board.context.num_ranks,
                timeout=timedelta(seconds=LOAD_TIMEOUT_S),  # the board has the deadline of steps
                **device,
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"execute.tensor_parallel: {backend} can't connect the ranks: {error}") from error
        # The names before and after torch 2.12.
        self._all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        self._end(self._all_gather(out.view(-1), own.reshape(-1), async_op=INTERPRETED))

    def all_reduce(self, tensor: Tensor) -> None:
        self._end(dist.all_reduce(tensor, async_op=INTERPRETED))

    def broadcast(self, tensor: Tensor) -> None:
        self._end(dist.broadcast(tensor, 0, async_op=INTERPRETED))

    def _end(self, work: Any) -> None:
        """gloo blocks the host: wait with the deadline of ranks."""
        if work is not None:
            self._board.wait(work.is_completed)
            work.wait()

    def close(self) -> None:
        # Destroying NCCL's group waits for the other ranks, which may be dead. The process ends now.
        if INTERPRETED and dist.is_initialized():
            dist.destroy_process_group()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
