"""One of several ranks on GPUs, as its runner sees it: its share of the model, and its links to the others.

    schedule ──step──► every rank: begin ─ launch: the same row changes, the same graph ─► rank 0 answers

All ranks launch the same kernels and collective operations in the same order. What they launch depends only on the
steps, never on a rank's own results or on time: a rank that launched something else would hang all of them.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from pipeline.config.settings import Settings
from pipeline.kernels.triton.gemm.device_matrix import Quantization
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.model.device_model import DeviceModel
from pipeline.stages.execute.cuda.ranks.board import RankBoard
from pipeline.stages.execute.cuda.ranks.collectives import Collectives, TorchCollectives
from pipeline.stages.execute.cuda.ranks.cut import ShardBuilder, rank_config
from pipeline.stages.execute.cuda.ranks.link import RankLink, one_shot_of
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.ranks.context import RankContext, StepAbandonedError
from pipeline.stages.execute.ranks.share import Share, share_of, unevenness

Connect = Callable[[RankBoard, torch.device], Collectives]
Join = Callable[[Settings, ModelConfig, torch.device, int], "DeviceRanks"]
"""Takes the settings, the whole model, the device and the most samples of a step."""


class DeviceRanks:
    """Owned by the runner."""

    def __init__(
        self,
        settings: Settings,
        config: ModelConfig,
        context: RankContext,
        where: torch.device,
        max_num_samples: int,
        connect: Connect = TorchCollectives,
    ) -> None:
        """Waits for the other ranks. Raises UserError if the model can't be cut into so many, or the ranks can't be
        connected."""
        self.whole = config
        self.share: Share = share_of(config, context.rank, context.num_ranks)
        self.config = rank_config(config, self.share)
        if self.is_first and (warning := unevenness(config, context.num_ranks)):
            logging.getLogger("pipeline").warning("%s", warning)
        self.board = RankBoard(context)
        self._collectives = connect(self.board, where)
        one_shot = one_shot_of(self.board, where) if settings.execute.all_reduce == "one_shot" else None
        self.link = RankLink(
            self.share, config.vocab_size, config.hidden_size, max_num_samples, where, self._collectives, one_shot
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which samples and answers."""
        return self.share.rank == 0

    def cut(self, model: DeviceModel, quantization: Quantization | None) -> ShardBuilder:
        """What records the rank's part of a model in `model`."""
        return ShardBuilder(model, self.whole, self.share, quantization)

    def agree_on(self, kv: KVPlan, num_swap_blocks: int) -> tuple[KVPlan, int]:
        """The plan of the rank with the fewest blocks, and the least swap blocks: schedule has one number for all."""
        num_blocks, max_model_len, num_swap = self.board.agree([kv.num_blocks, kv.max_model_len, num_swap_blocks])
        return KVPlan(num_blocks, max_model_len, kv.layout), num_swap

    def begin(self, incarnation: int, step_id: int) -> None:
        """Before a step changes anything. Raises StepAbandonedError if not all ranks may have got it, RankLateError if
        a rank does not come to it."""
        if not self.board.begin(incarnation, step_id):
            raise StepAbandonedError

    def wait_for(self, launched_step: LaunchedStep) -> None:
        """Wait for the end of a step in flight. Raises RankLateError."""
        self.board.wait(lambda: launched_step.is_over)

    def check(self, launched_s: float | None) -> None:
        """In every turn of the loop. `launched_s`: when the oldest step in flight was launched, by time.monotonic.
        Raises RankLateError."""
        self.board.beat()
        if launched_s is not None:
            self.board.check(time.monotonic() - launched_s)

    def close(self) -> None:
        self._collectives.close()


def join_by(context: RankContext, connect: Connect = TorchCollectives) -> Join:
    """Joins the group of ranks at a place; the argument of `CudaRunner`."""

    def join(settings: Settings, config: ModelConfig, where: torch.device, max_num_samples: int) -> DeviceRanks:
        return DeviceRanks(settings, config, context, where, max_num_samples, connect)

    return join


def busy(ranks: DeviceRanks | None) -> AbstractContextManager[None]:
    """Other ranks don't call this one late meanwhile."""
    return nullcontext() if ranks is None else ranks.board.busy()
