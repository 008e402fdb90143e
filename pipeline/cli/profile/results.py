"""The plan and the results of a profile, as plain numbers for tables and JSON."""

from typing import Literal

import msgspec


class Case(msgspec.Struct, frozen=True):
    """One kind of step."""

    phase: Literal["decode", "prefill", "verify"]
    num_seqs: int
    num_new: int
    """Tokens that the step computes for each sequence."""
    context: int
    """Tokens of each sequence, including those."""

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new

    @property
    def num_samples(self) -> int:
        """Tokens after which an id is sampled: all that are verified, else the last of each sequence."""
        return self.num_tokens if self.phase == "verify" else self.num_seqs


class ProfilePlan(msgspec.Struct, frozen=True):
    """The steps to measure."""

    batches: tuple[int, ...]
    """Batch sizes of decode steps."""
    context: int
    """Tokens of each sequence in a decode step, including the computed one."""
    prefills: tuple[int, ...]
    """Tokens of prefill steps: each is a whole prompt of one sequence."""
    rounds: int
    against: Literal["torch"] | None = None
    """Other kernels that compute the same steps, alternating with those of the settings."""
    shape: str | None = None
    """A shape of `SHAPES` with random weights, instead of the settings' model."""
    layers: int | None = None
    """Only this many layers of the shape."""

    verifies: tuple[int, ...] = ()
    """Numbers of proposed tokens that a decode step verifies for each sequence (speculative decoding)."""

    def cases(self) -> list[Case]:
        decodes = [Case("decode", num_seqs, 1, self.context) for num_seqs in self.batches]
        decodes += [Case("verify", batch, 1 + num, self.context) for batch in self.batches for num in self.verifies]
        return decodes + [Case("prefill", 1, num_tokens, num_tokens) for num_tokens in self.prefills]


class MachineRates(msgspec.Struct, frozen=True):
    """Rates that a step's threads reach together on this machine, or a GPU's rates; per second."""

    read_bytes: float
    """On a GPU, the bytes that a copy reads and writes."""
    float32_flops: float
    bf16_flops: float
    int8_ops: float | None
    """None for a GPU: all its matrix products are in floating point."""

    def best(self, other: "MachineRates") -> "MachineRates":
        """The better reading of each rate."""
        int8_ops = None if self.int8_ops is None or other.int8_ops is None else max(self.int8_ops, other.int8_ops)
        return MachineRates(
            max(self.read_bytes, other.read_bytes),
            max(self.float32_flops, other.float32_flops),
            max(self.bf16_flops, other.bf16_flops),
            int8_ops,
        )


class Floor(msgspec.Struct, frozen=True):
    """The lower bound of a time, and its share of the measured time."""

    ms: float
    share: float


class OpTime(msgspec.Struct, frozen=True):
    """All ops of a step with one name. Times are medians over the measured steps of the sum over these ops."""

    name: str
    is_integer: bool
    """Whether `operations` are integer operations."""
    count: int
    ms: float
    bytes: float
    operations: float
    gb_per_s: float
    gflop_per_s: float
    floor: Floor | None
    """The sum of the ops' floors; None if they have none."""


class KernelTime(msgspec.Struct, frozen=True):
    """All launches of a GPU kernel in a step; means over the traced steps."""

    name: str
    op: str
    """The name of the op in `StepTime.ops` that it belongs to."""
    count: float
    ms: float


class StepTime(msgspec.Struct, frozen=True):
    """A whole step. `ms` is the median over `num_samples` steps without op timers; on a GPU by the GPU's clock."""

    case: Case
    ms: float
    num_samples: int
    tokens_per_s: float
    ops: list[OpTime]
    """In the order of execution; empty if the kernels don't report ops."""
    in_turn: Floor | None
    overlapped: Floor | None
    against_ms: float | None = None
    speedup: float | None = None
    """against_ms / ms"""
    launch_ms: float | None = None
    """Median host time of a launch, on a GPU."""
    kernels: list[KernelTime] = []
    """On a GPU, the longest first."""


class Profile(msgspec.Struct, frozen=True):
    """One run of `pipeline profile execute`."""

    version: str
    """Version of this program."""
    model: str
    weight_bytes: dict[str, int]
    """By format, as loaded; an embedding that is also the head counts once."""
    kv_dtype: str
    kernels: str
    cpu: str
    num_threads: int
    plan: ProfilePlan
    before: MachineRates | None
    """None if the kernels don't report their needs; then there are no floors."""
    after: MachineRates | None
    steps: list[StepTime]
    against: str | None = None
    """Name of the other kernels."""
    gpu: str | None = None
    """Name of the GPU, if one computes."""
