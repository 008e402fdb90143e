"""The time of a step, from a replica's profile."""

from pipeline.replay.traffic import ReplicaProfile
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel


class KnownCosts(StepCostModel):
    """The scheduler's cost model with coefficients that are known from the start and do not change."""

    __slots__ = ()

    def __init__(self, profile: ReplicaProfile) -> None:
        super().__init__()
        self.coefficients = (profile.base_s, profile.row_s, profile.context_s, profile.token_s, profile.pair_s)

    @property
    def is_known(self) -> bool:
        return True

    def observe(
        self, num_decodes: float, context: float, num_chunk_tokens: float, pairs: float, seconds: float
    ) -> None:
        """Learns nothing."""
