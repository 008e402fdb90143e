"""Where a rank stands among the processes that compute a model together, and how their steps fail."""

from dataclasses import dataclass

from pipeline.errors import UserError

LOAD_TIMEOUT_S = 600.0
"""At barriers while the ranks load: one may have read its weights long before another. The supervisor has a shorter
deadline for all."""


class RankLateError(UserError):
    """A rank did not come to a barrier in time. The message names it, and where it stood."""


class StepAbandonedError(RuntimeError):
    """A step was not computed: its scheduler has died, and not all ranks may have got it."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank's place in the group that computes a stage of the pipeline, and that stage's place."""

    rank: int
    num_ranks: int
    """Of one stage."""
    fd: int
    """Memory that the group shares, empty at first; not used by a group of one."""
    timeout_s: float
    stage: int = 0
    num_stages: int = 1
    link_fd: int = -1
    """Memory that all stages share, empty at first."""

    @property
    def number(self) -> int:
        """N in the name `execute.N`."""
        return self.first_of(self.stage) + self.rank

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Whether it samples, and sends the results."""
        return self.is_last_stage and self.rank == 0

    def first_of(self, stage: int) -> int:
        """The number of rank 0 of a stage."""
        return stage * self.num_ranks

    def late_error(self, who: str, where: str, step_id: int) -> RankLateError:
        """`who` stood `where` for longer than the settings allow."""
        return RankLateError(
            f"{who} stood {where}, step {step_id}, for {self.timeout_s:g} s (execute.barrier_timeout_s)"
        )

    def __str__(self) -> str:
        """For logs, as `pp0/tp1`."""
        return f"pp{self.stage}/tp{self.rank}"


ALONE = RankContext(0, 1, -1, 0.0)
"""Of a process that computes the whole model."""

TENSOR_PARALLEL = "the ranks of execute.tensor_parallel"
PIPELINE_PARALLEL = "the stages of execute.pipeline_parallel"
"""Names of groups in errors."""
