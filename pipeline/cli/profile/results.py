"""What is measured, and what comes of it: plain numbers that become a table or JSON."""

from typing import Literal

import msgspec


class Case(msgspec.Struct, frozen=True):
    """One step."""

    phase: Literal["decode", "prefill"]
    num_seqs: int
    num_new: int
    """Tokens that the step computes of each sequence."""
    context: int
    """Tokens that each sequence has with these."""

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new


class ProfilePlan(msgspec.Struct, frozen=True):
    """What to measure."""

    batches: tuple[int, ...]
    """Sequences of each decode step."""
    context: int
    """Tokens that each of them has with the one that is computed."""
    prefills: tuple[int, ...]
    """Tokens of each prefill step: a whole prompt of one sequence."""
    rounds: int
    against: Literal["torch"] | None = None
    """Kernels that compute the same steps, in turns with those of the settings."""
    shape: str | None = None
    """A shape of `SHAPES` with random weights, instead of the model of the settings."""

    def cases(self) -> list[Case]:
        decodes = [Case("decode", num_seqs, 1, self.context) for num_seqs in self.batches]
        return decodes + [Case("prefill", 1, num_tokens, num_tokens) for num_tokens in self.prefills]


class MachineRates(msgspec.Struct, frozen=True):
    """What the threads of a step reach together on this machine, a second; or what a GPU does."""

    read_bytes: float
    """On a GPU those that a copy reads and writes."""
    float32_flops: float
    bf16_flops: float
    int8_ops: float | None
    """None of a GPU, whose products are all of floats."""

    def best(self, other: "MachineRates") -> "MachineRates":
        """The better of the two for each."""
        int8_ops = None if self.int8_ops is None or other.int8_ops is None else max(self.int8_ops, other.int8_ops)
        return MachineRates(
            max(self.read_bytes, other.read_bytes),
            max(self.float32_flops, other.float32_flops),
            max(self.bf16_flops, other.bf16_flops),
            int8_ops,
        )


class Floor(msgspec.Struct, frozen=True):
    """The least time of something, and which share of the time it takes that is."""

    ms: float
    share: float


class OpTime(msgspec.Struct, frozen=True):
    """All ops of a step that have one name. Times are medians over the steps measured, of the sum over these ops."""

    name: str
    is_integer: bool
    """Whether `operations` are of integers."""
    count: int
    ms: float
    bytes: float
    operations: float
    gb_per_s: float
    gflop_per_s: float
    floor: Floor | None
    """The sum of the ops' floors; None of ops that have none."""


class KernelTime(msgspec.Struct, frozen=True):
    """All launches of a GPU's kernel in a step; means over the steps that were looked at."""

    name: str
    op: str
    """Of `StepTime.ops`, whose part it is."""
    count: float
    ms: float


class StepTime(msgspec.Struct, frozen=True):
    """A step as a whole. `ms` is the median over `num_samples` steps, none of which was timed op by op; on a GPU it is
    by the GPU's clock."""

    case: Case
    ms: float
    num_samples: int
    tokens_per_s: float
    ops: list[OpTime]
    """In the order of the step; empty where the kernels can't tell."""
    in_turn: Floor | None
    overlapped: Floor | None
    against_ms: float | None = None
    speedup: float | None = None
    """against_ms / ms"""
    launch_ms: float | None = None
    """The median of what a launch took of the host's time, where a GPU computes."""
    kernels: list[KernelTime] = []
    """Of a GPU, the longest first."""


class Profile(msgspec.Struct, frozen=True):
    """One run of `pipeline profile execute`."""

    version: str
    """Of this program."""
    model: str
    weight_bytes: dict[str, int]
    """By format, as the program was given them; an embedding that is the head too counts once."""
    kv_dtype: str
    kernels: str
    cpu: str
    num_threads: int
    plan: ProfilePlan
    before: MachineRates | None
    """None where the kernels can't tell what an op must do, so that there are no floors."""
    after: MachineRates | None
    steps: list[StepTime]
    against: str | None = None
    """Name of the other kernels."""
    gpu: str | None = None
    """Its name, where one computes."""
